"""Brings configurations up to date that were saved before something was renamed or removed."""

from __future__ import annotations

from typing import Any

MOVED = {
    "data.features": "data.decomposition.features",
    "data.images": "data.digits.images",
    "data.puzzles": "data.recursive.puzzles",
    "data.qa": "data.latent.qa",
    "data.qa_text": "data.latent.qa_text",
    "data.text_stream": "data.language.text_stream",
    "data.tokens": "data.language.tokens",
    "models.cnn": "models.digits.cnn",
    "models.components": "models.decomposition.components",
    "models.gpt": "models.language.gpt",
    "models.hrm": "models.recursive.hrm",
    "models.objectives.act": "models.recursive.act",
    "models.objectives.causal_lm": "models.language.causal_lm",
    "models.objectives.classify": "models.digits.classify",
    "models.objectives.compress": "models.latent.compress",
    "models.objectives.decompose": "models.decomposition.decompose",
    "models.objectives.regress": "models.decomposition.regress",
    "models.prefix": "models.latent.prefix",
    "models.toy": "models.decomposition.toy",
    "models.trm": "models.recursive.trm",
    # single names, whose modules are still there or moved earlier
    "optim.exact.build_reducer": "optim.sync.allreduce.build",
    "optim.sync.exact.build_reducer": "optim.sync.allreduce.build",
    "optim.schedule.WarmupCosine": "optim.schedule.WarmupDecay",
}

# keys of `data` that repeated those of the run, before sources got them as `RunSettings`
REPEATED = {
    "seed",
    "shards",
    "num_workers",
    "global_batch_size",
    "tokens_per_update",
    "epochs",
    "eval_interval",
    "max_tokens",
    "max_steps",
    "eval_every_steps",
    "eval_only",
    "data_path",
}


def up_to_date(config: Any) -> Any:
    """Returns a copy of a run's plain configuration with current names and no repeated keys."""
    config = with_current_names(config)
    if isinstance(config, dict) and isinstance(data := config.get("data"), dict):
        config["data"] = {
            key: value
            for key, value in data.items()
            # a run writes plain values there; whatever else it is must meet the checks that follow
            if key not in REPEATED or isinstance(value, dict) or value != config.get(key, value)
        }
    return config


def current_name(target: str) -> str:
    """Returns today's name of a target such as `models.gpt.GPT`."""
    if target in MOVED:
        return MOVED[target]
    module, dot, name = target.rpartition(".")
    return f"{MOVED.get(module, module)}{dot}{name}"


def with_current_names(config: Any) -> Any:
    """A copy of a plain configuration in which every `_target_` has its current name."""
    if isinstance(config, dict):
        return {
            key: current_name(value)
            if key == "_target_" and isinstance(value, str)
            else with_current_names(value)
            for key, value in config.items()
        }
    if isinstance(config, list):
        return [with_current_names(value) for value in config]
    return config
