"""Old names of modules, classes and functions, for configurations saved before they moved."""

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
}


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
