"""Everything that makes a run go on as if nothing had happened, as tensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from utils import checkpoint, git
from utils.errors import ConfigError
from utils.slots import within

KEPT = ("evaluation_due", "results", "best", "best_of", "resumed_from")  # of a job, beside its tensors


def snapshot(job: Any) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]], dict[str, Any]]:
    """What all ranks share, by group; what this rank's shards remember; and the rest, for JSON. The tensors are live."""
    groups = {"model": job.objective.state_dict(), "optimizer": optimizer_state(job.dense)}
    groups |= {"ema": job.ema.state()} if job.ema is not None else {}
    shards = {
        shard: {f"carry/{name}": tensor for name, tensor in carry.items()}
        | {f"meter/{name}": tensor for name, tensor in job.meter.state(shard).items()}
        for shard, carry in job.slots.state().items()
    }
    meta = {key: getattr(job, key) for key in KEPT} | {
        "config": OmegaConf.to_yaml(job.cfg), "fingerprint": job.source.spec.fingerprint, "wandb_id": job.run.wandb_id,
        "code": git.summary(), "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return groups, shards, meta


def restore(job: Any, folder: Path, meta: Mapping[str, Any]) -> None:
    """Go on from a checkpoint."""
    load_weights(job, folder)
    load_optimizer_state(job.dense, checkpoint.load(folder, {"optimizer"})[0]["optimizer"])
    saved = checkpoint.load_shards(folder, [shard for part in job.parts for shard in part])
    job.slots.restore({shard: within("carry/", tensors) for shard, tensors in saved.items()})
    for shard, tensors in saved.items():
        job.meter.restore(shard, within("meter/", tensors), job.dist.device)
    for key in KEPT:
        setattr(job, key, meta[key])
    for what, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
        if meta[what] != now:
            job.run.say(f"{what}: {meta[what]} when the checkpoint was written, {now} now; the run goes on, with other rounding")
    if meta["code"] != git.summary():
        job.run.say("the code has changed since the checkpoint: " + " ".join(meta["code"].split()) + " then")


def load_weights(job: Any, path: str | Path) -> None:
    """The weights of a checkpoint, and its averaged ones when `ema` is on."""
    groups, meta = checkpoint.load(path, {"model", "ema"})
    checkpoint.load_into(job.objective, groups["model"], str(path))
    if job.ema is not None:
        if "ema" not in groups:
            raise ConfigError(f"ema=true: checkpoint={path} holds no averaged weights; use ema=false")
        job.ema.load(groups["ema"])
    job.step = meta.get("step", 0)


def optimizer_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor and counter, named `<optimizer>/<parameter>/<what>`; the tensors are live."""
    state: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            if "step" in group:
                state[f"{number}/group{place}/step"] = torch.as_tensor(group["step"])
            for name, parameter in _named(group):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        state[f"{number}/{name}/{key}"] = torch.as_tensor(value)
    return state


def load_optimizer_state(optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Tensor]) -> None:
    """Continue from a saved `optimizer_state`; hyper-parameters stay those of the configuration."""
    by_owner: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        owner, _, what = key.rpartition("/")
        by_owner.setdefault(owner, {})[what] = value
    for number, optimizer in enumerate(optimizers):
        content = optimizer.state_dict()
        places: dict[int, Any] = {}
        for place, (group, saved) in enumerate(zip(optimizer.param_groups, content["param_groups"], strict=True)):
            if counter := by_owner.pop(f"{number}/group{place}", None):
                saved["step"] = int(counter["step"])
            for (name, _), index in zip(_named(group), saved["params"], strict=True):
                if own := by_owner.pop(f"{number}/{name}", None):
                    places[index] = own
        optimizer.load_state_dict({**content, "state": places})
    assert not by_owner, f"no optimizer here knows {next(iter(by_owner))}"


def _named(group: dict[str, Any]) -> list[tuple[str, torch.nn.Parameter]]:
    return list(zip(group.get("param_names", ()), group["params"], strict=False))
