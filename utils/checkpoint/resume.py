"""Finds where a run begins: afresh, where it ended, at a named checkpoint, or with the weights of
another run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from yaml import YAMLError

from utils import revision
from utils.checkpoint import format, reader
from utils.checkpoint.folders import steps_in
from utils.checkpoint.format import Stored
from utils.checkpoint.registry import EVALUATED, Registry, described, from_description
from utils.command.keys import fields_of, run_values
from utils.command.marks import MAY_CHANGE, SAME_RUN
from utils.command.root import Config
from utils.errors import ConfigError, said_of, short, visible
from utils.files import read_text
from utils.ranks.distributed import Dist

NO_PATH = ("auto", True, False)  # values of `resume` that name no checkpoint
AFRESH = "add resume=false to move all that aside and begin again"


@dataclass(frozen=True)
class Start:
    """Where a run begins:

    - afresh: neither `folder` nor `continues`;
    - afresh, in the directory of an earlier attempt that ended before a checkpoint: `continues`;
    - where it ended: `folder` is its newest checkpoint, and `continues`;
    - at a checkpoint of another place, which `resume` or, for an evaluation, `checkpoint` names:
      `folder`, and not `continues`. That of an evaluation may be a file of weights.
    """

    folder: Path | None = None
    continues: bool = False  # the run directory is this run's own; else it is moved aside
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.meta.get("step", 0)

    def is_finished(self, total_steps: int) -> bool:
        """True if nothing is left to do, not even an evaluation."""
        return self.continues and self.step == total_steps and not self.meta["evaluation_due"]


def find(
    config: Config, dist: Dist, say: Callable[[str], None], started_again: bool = False
) -> Start:
    """Rank 0 decides; every rank gets its decision. If a launcher has `started_again` a run,
    `resume=false` has taken effect already.
    """

    def look() -> Start:
        if config.eval_only:
            return _weights_to_evaluate(Path(str(config.checkpoint)))
        if config.resume is False and not started_again:
            return Start()
        return _own_or_named(config, say)

    return _broadcast_start(dist, look)


def _broadcast_start(dist: Dist, decide: Callable[[], Start]) -> Start:
    """Sends rank 0's decision to every rank."""
    text = ""
    with dist.agreed():
        if dist.is_main:
            start = decide()
            text = json.dumps([str(start.folder or ""), start.continues, dict(start.meta)])
    folder, continues, meta = json.loads(dist.broadcast_text(text))
    return Start(Path(folder) if folder else None, continues, meta)


def _weights_to_evaluate(path: Path) -> Start:
    """The weights that `checkpoint` names."""

    def read(folder: Path) -> Start:
        # not all of it: an evaluation continues neither the run nor its W&B run
        meta = reader.read_meta(folder)
        kept = ("step", "config", "frozen", "needed_runs")
        return Start(folder, meta={key: meta[key] for key in kept if key in meta})

    return Start(path) if reader.is_weights(path) else reader.reading(path, read)


def _own_or_named(config: Config, say: Callable[[str], None]) -> Start:
    directory = Path(config.checkpoint_path)
    with said_of("checkpoint_path"):
        newest = reader.newest_whole(directory / "checkpoints", say)
        meta = reader.read_meta(newest) if newest else {}
    elsewhere = config.resume not in NO_PATH and meta.get("resumed_from") != config.resume
    # otherwise this run has started from there already, and was interrupted
    if elsewhere and (there := _at(config, newest)) is not None:
        return there
    if newest is not None:
        with said_of("checkpoint_path"):
            return _same_run(Start(newest, True, meta), config, directory)
    if steps_in(directory / "checkpoints"):
        raise ConfigError(f"checkpoint_path={directory}: no checkpoint there is whole; {AFRESH}")
    try:  # interrupted before its first checkpoint, a run begins again in its own directory
        then = OmegaConf.to_container(OmegaConf.create(read_text(directory / "config.yaml")))
    except (OSError, ValueError, YAMLError):
        return Start()
    return Start(
        continues=isinstance(then, dict) and then != {} and not _changed_keys(then, config)
    )


@said_of("resume")
def _at(config: Config, newest: Path | None) -> Start | None:
    """The checkpoint that `resume` names; None if the run resumes from its own."""
    path, directory = Path(str(config.resume)), Path(config.checkpoint_path)
    if any(
        _same(path, own_path)
        for own_path in (directory, directory / "checkpoints", directory / "checkpoints" / "latest")
    ):
        return None
    weights_alone = ConfigError(
        f"resume={path}: holds weights alone; use init_from={path} to begin with them"
    )
    if reader.is_weights(path):
        raise weights_alone

    def read(folder: Path) -> Start | None:
        if newest is not None and _same(folder, newest):
            return None
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(directory)):
            raise ConfigError(
                f"resume={path}: lies in this run's own directory, and the run goes on from its"
                " newest; give another run_name (or checkpoint_path) to begin from there"
            )
        if format.read_manifest(folder).keys() == {format.META, f"model{format.SUFFIX}"}:
            raise weights_alone
        return _same_run(Start(folder, meta=reader.read_meta(folder)), config, folder)

    return reader.reading(path, read)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _same_run(start: Start, config: Config, where: Path) -> Start:
    """A start from a checkpoint of this very run, if it is one."""
    from_path = config.resume not in NO_PATH
    remedy = (  # under another name, it would meet the same checkpoint
        "give init_from in place of resume to begin with its weights"
        if from_path
        else "choose another run_name, add resume=false to begin again, or init_from to begin with"
        " its weights"
    )
    if unsaid := [name for name in reader.Meta.__annotations__ if name not in start.meta]:
        raise ConfigError(
            f"written by another version, without {unsaid[0]!r}",
            key="checkpoint",
            value=where,
            remedy=remedy,
        )
    if changed := _changed_keys(start.meta["config"], config):
        now = " ".join(f"{key}={short(new)}" for key, (_, new) in changed.items())
        then = " ".join(f"{key}={short(old)}" for key, (old, _) in changed.items())
        raise ConfigError(f"{now}: the run in {where} has {then}; keep that, or {remedy}")
    # recorded in every checkpoint from now on, so that the run does not start from there again
    named = {"resumed_from": str(config.resume)} if from_path else {}
    return replace(start, meta={**start.meta, **named})


def _changed_keys(saved: Mapping[Any, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that change the run, with both values; a key that only one side has came or went with
    the code.
    """
    now = config.plain()
    fields = fields_of(now)
    old, new = (run_values(side, fields, SAME_RUN, MAY_CHANGE) for side in (dict(saved), now))
    # auto became the old one
    changed = {
        key: (old[key], new[key])
        for key in new
        if key in old and new[key] not in (old[key], "auto")
    }
    # what follows from a root key is not listed twice
    return {key: pair for key, pair in changed.items() if "." not in key} or changed


def restore(
    start: Start,
    registry: Registry,
    config: Config,
    say: Callable[[str], None],
    total_steps: int,
    lr_after: Callable[[int], float],
) -> Start:
    """Restores the tensors of the checkpoint that the run starts from, the same one on all ranks.

    If it is damaged or does not fit, says so and tries the one before it. `lr_after` so many steps
    is this run's rate.
    """
    dist = registry.dist
    while start.folder is not None:
        with dist.agreed():
            check_fits(start, config, registry.origin, total_steps)
        with dist.waiting(forever=True):
            problem = _load(start.folder, start.step, registry)
        if not problem:
            if not config.eval_only:
                for line in remarks(registry.origin, start.meta, lr_after(start.step)):
                    say(visible(line))
            break
        start = _broadcast_start(dist, partial(_instead, start, visible(problem), config, say))
    return start


def made_with(device: torch.device, compiled: bool) -> dict[str, Any]:
    """Returns what this run computes with, for meta.json."""
    return {
        "code": revision.summary(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compile": compiled,
        "device": device.type,
    }


def remarks(now: Mapping[str, Any], then: Mapping[str, Any], lr: float) -> list[str]:
    """Returns what to tell the user when this run continues a checkpoint, at the rate `lr`: one
    line for each difference that can change results.
    """
    lines = []
    for what in ("threads", "torch", "compile", "device"):
        if then[what] != now[what]:
            lines.append(
                f"{what}: {short(then[what])} when the checkpoint was written, {short(now[what])}"
                " now; the run goes on, with other rounding"
            )
    if then["code"] not in ("", now["code"]):
        code = " ".join(then["code"].split())
        lines.append(f"the code has changed since the checkpoint: {code} then")
    before, after = f"{then['lr']:.6g}", f"{lr:.6g}"
    if before != after and then["step"]:
        lines.append(
            f"the learning rate jumps at step {then['step']} from {before} to {after}, because the"
            " run has another length now"
        )
    return lines


def check_fits(start: Start, config: Config, origin: Mapping[str, Any], total_steps: int) -> None:
    """Refuses other data, other frozen parts, and a length that ends before the checkpoint."""
    for name, then in start.meta.get("frozen", {}).items():
        now = origin["frozen"].get(name, then)
        if now["sha256"] != then["sha256"]:
            raise ConfigError(
                f"{name}={now['path']}: not what the run in {start.folder} was trained with (sha256"
                f" {now['sha256'][:12]}, there {then['sha256'][:12]}); give the file that was"
                f" {then['path']} then"
            )
    if not config.eval_only and (part := _other_part(start, config, origin["data"])):
        raise ConfigError(
            f"data_path={short(config.data_path)}: not the data of the run in {start.folder}"
            f" ({part} differs); give that, and let it depend on neither the time nor"
            " PYTHONHASHSEED, or begin with init_from"
        )
    if not config.eval_only and total_steps < start.step:
        key, value = "max_steps", config.max_steps
        if value is None:
            key, value = "epochs", config.epochs
        raise ConfigError(
            f"{key}={value}: that is {total_steps} steps, and the run has done {start.step};"
            f" raise {key}, with run_name={config.run_name}"
        )


def _other_part(start: Start, config: Config, now: Mapping[str, str]) -> str:
    """Names a part of the data that has changed; empty if none has."""
    then: Mapping[str, str] = start.meta["data"]
    # keys of the data that may change choose what evaluations ask
    same_keys = start.meta["config"].get("data") == config.plain().get("data")
    changed = (part for part in {**then, **now} if then.get(part) != now.get(part))
    return next((part for part in changed if same_keys or not part.startswith(EVALUATED)), "")


def _load(folder: Path, step: int, registry: Registry) -> str:
    """Loads a checkpoint, which rank 0 reads. Returns an empty string, or why no rank can use it,
    the same on all.
    """
    # rank 0 hashes the files, and tells the others what they hold
    dist, problem = registry.dist, ""
    stored: dict[str, dict[str, Stored]] = {}
    with dist.agreed():
        if dist.is_main:
            try:
                stored = reader.open_checkpoint(folder, registry.names, hashed=True).groups
            except ConfigError as error:
                problem = error.what  # the caller has another checkpoint, or says what to do
        texts = {
            group: described({name: each.meta for name, each in tensors.items()})
            for group, tensors in stored.items()
        }
    if problem := dist.broadcast_text(problem):
        return problem
    texts = json.loads(dist.broadcast_text(json.dumps(texts)))
    shapes = {group: from_description(text) for group, text in texts.items()}

    # nothing of the run changes before all ranks know that the checkpoint fits
    with dist.agreed():
        try:
            registry.check(shapes, step)
        except ConfigError as error:
            problem = f"{folder.name} does not fit ({error.what})"
    if problem := _first(problem, dist):
        return problem

    try:
        registry.load(shapes, stored)
    except format.Unreadable as error:
        problem = f"{folder.name} is damaged ({error})"
    return _first(problem, dist)


def _first(problem: str, dist: Dist) -> str:
    """The first problem that any rank has, the same on all."""
    return next(filter(None, dist.all_gather_text(problem)), "")


def _instead(start: Start, problem: str, config: Config, say: Callable[[str], None]) -> Start:
    """Returns the start to use in place of a checkpoint that is damaged or does not fit."""
    directory = Path(config.checkpoint_path)
    if config.eval_only:
        latest = _weights_to_evaluate(Path(str(config.checkpoint)))
        if latest.folder == start.folder:
            raise ConfigError(problem, key="checkpoint", value=start.folder)
        return latest
    if start.continues:
        newest = reader.newest_whole(directory / "checkpoints", say, start.step)
        if newest is None:
            raise ConfigError(
                f"checkpoint_path={directory}: no checkpoint there can be used: {problem}; {AFRESH}"
            )
        say(f"checkpoint {problem}; going back to {newest.name}")
        return _same_run(Start(newest, True, reader.read_meta(newest)), config, directory)
    there = _at(config, None)
    if there is None or there.folder == start.folder:
        raise ConfigError(f"resume={config.resume}: {problem}; give another step_* folder")
    return there
