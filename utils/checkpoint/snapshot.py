"""Everything that makes a run go on as if nothing had happened, as tensors and JSON."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from utils import revision
from utils.checkpoint import reader
from utils.checkpoint.carries import within
from utils.checkpoint.meta import config_of
from utils.errors import ConfigError

PAIR = torch.empty(2, dtype=torch.float64, device="meta")  # a sum and its count
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
        "lr": _rate(job), "code": revision.summary(), "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return groups, shards, meta


def restore(job: Any, folder: Path, meta: Mapping[str, Any]) -> None:
    """Go on from a checkpoint. A ConfigError leaves the job as it was: all is compared before anything is taken."""
    groups = reader.load(folder, {"model", "optimizer", "ema"})[0]
    shards = reader.load_shards(folder, [shard for part in job.parts for shard in part])
    carries = {shard: within("carry/", tensors) for shard, tensors in shards.items()}
    meters = {shard: within("meter/", tensors) for shard, tensors in shards.items()}
    _check_groups(job, groups, meta)
    job.slots.check(carries)
    for shard, tensors in shards.items():
        own = {f"meter/{name}": PAIR for name in meters[shard]} | {f"carry/{name}": tensor for name, tensor in carries[shard].items()}
        reader.check_alike(own, tensors, f"shard {shard}", same_types=True)

    _take_weights(job, groups)
    load_optimizer_state(job.dense, groups["optimizer"])
    job.slots.restore(carries)
    job.meter.clear()  # of what another checkpoint has left there that did not fit on some other rank
    for shard, tensors in meters.items():
        job.meter.restore(shard, tensors, job.dist.device)
    for key in ("step", *KEPT):
        setattr(job, key, meta[key])
    _say_what_differs(job, meta)


def load_weights(job: Any, path: str | Path) -> None:
    """The weights of a checkpoint, and its averaged ones when `ema` is on."""
    groups, meta = reader.load(path, {"model", "ema"})
    reader.check_alike(job.objective.state_dict(), groups.get("model", {}), f"checkpoint={path}")
    if job.ema is not None:
        if "ema" not in groups:
            raise ConfigError(f"ema=true: checkpoint={path} holds no averaged weights; use ema=false")
        reader.check_alike(job.ema.state(), groups["ema"], f"checkpoint={path}", same_types=True)
    _take_weights(job, groups)
    job.step = meta.get("step", 0)


def _take_weights(job: Any, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    job.objective.load_state_dict(groups["model"])
    if job.ema is not None:
        job.ema.load(groups["ema"])


def _check_groups(job: Any, groups: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
    own = {"model": job.objective.state_dict(), "optimizer": optimizer_state(job.dense)}
    own |= {"ema": job.ema.state()} if job.ema is not None else {}
    untouched = meta["step"] == 0 or config_of(meta["config"]).get("on_nonfinite") == "skip"  # every step so far may have been refused
    if not (untouched and groups.get("optimizer", {}).keys() == own["optimizer"].keys()):
        own["optimizer"] |= _memories(job.dense)
    for group, tensors in own.items():
        reader.check_alike(tensors, groups.get(group, {}), group, same_types=True)


def _say_what_differs(job: Any, meta: Mapping[str, Any]) -> None:
    for what, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
        if meta[what] != now:
            job.run.say(f"{what}: {meta[what]} when the checkpoint was written, {now} now; the run goes on, with other rounding")
    if meta["code"] and meta["code"] != revision.summary():
        job.run.say("the code has changed since the checkpoint: " + " ".join(meta["code"].split()) + " then")
    before, after = (f"{rate:.6g}" for rate in (meta.get("lr", _rate(job)), _rate(job)))
    if before != after and job.step:
        job.run.say(f"the learning rate jumps at step {job.step} from {before} to {after}, because the run has another length now")


def _rate(job: Any) -> float:
    """The rate of the step that was taken last, as the schedule has it for the run's length."""
    return job.dense[-1].param_groups[0]["base_lr"] * job.schedule(job.step)


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


def _memories(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """What `optimizer_state` holds of the parameters after a step, as tensors without content."""
    state: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for name, parameter in _named(group):
                for key, value in _memory(optimizer, group, parameter).items():
                    shape = parameter.shape if value.shape == (2, 2) else value.shape
                    state[f"{number}/{name}/{key}"] = torch.empty(shape, dtype=value.dtype, device="meta")
    return state


def _memory(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """What an optimizer keeps of one parameter: asked of a twin that takes a step with a tiny one."""
    tiny = torch.nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
    tiny.grad = torch.zeros_like(tiny)
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [tiny]}]
    twin.step()
    return {key: torch.as_tensor(value) for key, value in twin.state[tiny].items() if value is not None}


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
