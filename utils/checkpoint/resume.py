"""Finds where a run begins: afresh, where it ended, or at a named checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from omegaconf import DictConfig, OmegaConf

from utils.checkpoint import manifest, reader
from utils.checkpoint.meta import config_of
from utils.checkpoint.registry import Origin, Registry
from utils.checkpoint.stepfolders import folder_or_aside, steps_in
from utils.command.keys import fields_of, run_values
from utils.command.marks import MAY_CHANGE, SAME_RUN
from utils.errors import ConfigError, brief, said_of, short, visible
from utils.files import read_text
from utils.measure.hardware import forward_dtype
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.folders import MARKS
from utils.rundir.status import started_again

NO_PATH = ("auto", True, False)  # values of `resume` that name no checkpoint
AFRESH = "add resume=false to move all that aside and begin again"
ELSEWHERE = "give another run_name (or checkpoint_path) to begin from there"


@dataclass(frozen=True)
class Start:
    """The state of this run that is found on the disk."""

    # the checkpoint to go on from (of an evaluation: to evaluate, which may be a file); None: the
    # beginning
    folder: Path | None = None
    continues: bool = False  # the run directory is this run's own; else it is moved aside
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.meta.get("step", 0)

    def is_finished(self, total_steps: int) -> bool:
        """Returns whether nothing is left to do, not even an evaluation."""
        return (
            self.continues
            and self.step == total_steps
            and not self.meta.get("evaluation_due", True)
        )


def find(config: DictConfig, dist: Dist, say: Callable[[str], None]) -> Start:
    """Rank 0 looks and decides; every rank gets its decision."""

    def look() -> Start:
        if config.eval_only:
            return _weights_to_evaluate(Path(config.checkpoint))
        directory, start = Path(config.checkpoint_path), Start()
        # what a launcher starts again has obeyed `resume=false` already, if it came so far
        if config.resume is not False or started_again(directory):
            start = _own_or_named(config, say)
        moved = start == Start() and any(os.path.exists(directory / mark) for mark in MARKS)
        if (
            moved
            and config.init_from
            and _real(Path(config.init_from)).is_relative_to(_real(directory))
        ):
            # started again, the same command would not find them
            raise ConfigError(
                f"init_from={config.init_from}: lies in this run's own directory, which is to be"
                f" moved aside; {ELSEWHERE}"
            )
        return start

    return _broadcast_start(dist, look)


def fix_arithmetic(config: DictConfig, start: Start, dist: Dist) -> None:
    """Sets `arch.forward_dtype=auto` to what the run has computed in, or what suits rank 0's
    machine, and on a CPU `compile=auto` to whether the run was compiled.

    Written down, it stays the same on every rank and machine.
    """
    before = config_of(start.meta["config"]) if "config" in start.meta else {}
    if before and config.get("compile") == "auto" and dist.device.type == "cpu":
        config.compile = before.get("compile") is True and not config.eval_only
    if config.arch.get("forward_dtype") == "auto":
        then = before["arch"].get("forward_dtype", "auto") if before else "auto"
        # planned for GPUs that are elsewhere
        best = "bfloat16" if config.get("plan_cards") else forward_dtype(dist.device)
        config.arch.forward_dtype = dist.broadcast_text(best) if then == "auto" else then


def restore(
    start: Start, saved: Registry, config: DictConfig, run: RunDirectory, total_steps: int
) -> Start:
    """Restores the checkpoint that the run starts from, the same one on all ranks.

    If it is damaged or does not fit, says so and tries the one before it. Each rank reads only what
    it keeps, after all ranks have found their files undamaged.
    """
    dist, tries = run.dist, reader.TRIES
    while start.folder is not None:
        with dist.agreed():
            check_fits(start, config, saved.origin(), total_steps)
        opened, problem = _open(start, saved, config, dist)
        if not (problem := _first(problem, dist)):
            files = saved.files(opened.groups, opened.shards)
            problem = damage_seen_by_any(opened, files, dist)
        if not problem:
            problem = _first(_read(opened, saved, dist), dist)
        if not problem:
            saved.run_state.load(start.meta)
            for line in saved.origin().differences(start.meta):
                run.say(visible(line))
            break
        tries -= 1
        problem = visible(problem.removesuffix(f"; {reader.ANOTHER}"))
        start = _broadcast_start(dist, partial(_instead, start, problem, config, run.say, tries))
    return start


def check_fits(start: Start, config: DictConfig, origin: Origin, total_steps: int) -> None:
    """Refuses other data, other frozen parts, and a length that ends before the checkpoint."""
    for name, then in start.meta.get("frozen", {}).items():
        now = origin.frozen.get(name, then)
        if now["sha256"] != then["sha256"]:
            raise ConfigError(
                f"{name}={now['path']}: not what the run in {start.folder} was trained with (sha256"
                f" {now['sha256'][:12]}, there {then['sha256'][:12]}); give the file that was"
                f" {then['path']} then"
            )
    if not config.eval_only and start.meta["fingerprint"] != origin.fingerprint:
        raise ConfigError(
            f"data_path={config.data_path}: not the data of the run in {start.folder}, or cut into"
            " other windows; use that, or init_from to begin with its weights"
        )
    if not config.eval_only and total_steps < start.step:
        key = "epochs" if config.max_steps is None else "max_steps"
        raise ConfigError(
            f"{key}={config[key]}: that is {total_steps} steps, and the run has done {start.step};"
            f" raise {key}"
        )


def _broadcast_start(dist: Dist, decide: Callable[[], Start]) -> Start:
    """Sends rank 0's decision to every rank."""
    text = ""
    with dist.agreed():
        if dist.is_main:
            start = decide()
            text = json.dumps([str(start.folder or ""), start.continues, dict(start.meta)])
    folder, continues, meta = json.loads(dist.broadcast_text(text))
    return Start(Path(folder) if folder else None, continues, meta)


def _open(
    start: Start, saved: Registry, config: DictConfig, dist: Dist
) -> tuple[reader.Opened, str]:
    """Returns a checkpoint's content for this rank, or why it does not fit."""
    assert start.folder is not None
    opened, problem = reader.Opened(start.folder, {}), ""
    with dist.agreed():
        try:
            shards = [] if config.eval_only else dist.owned_shards(config.shards)
            opened = reader.open_checkpoint(start.folder, saved.names, shards)
            saved.check(opened.groups, opened.shards, start.step)
        except ConfigError as error:
            problem = str(error).replace(f"checkpoint={start.folder}: ", "")
    return opened, problem


def _read(opened: reader.Opened, saved: Registry, dist: Dist) -> str:
    """Loads this rank's part; empty unless a run that goes on has deleted the checkpoint
    meanwhile.
    """
    with dist.agreed():
        try:
            saved.load(opened.groups, opened.shards)
        except OSError as error:
            return f"cannot be read: {brief(error)}"
    return ""


def _first(problem: str, dist: Dist) -> str:
    """The first problem that any rank has, the same on all."""
    return next(filter(None, dist.all_gather_text(problem)), "")


def damage_seen_by_any(opened: reader.Opened, names: Collection[str], dist: Dist) -> str:
    """Empty if the files that each rank is about to read are as they were written, also on its own
    host; else one line, the same on all ranks.

    On each host, a file is hashed by one of the ranks that read it.
    """
    stated = {name: opened.sha256.get(name, "") for name in sorted(names)}
    everyone = _exchange([gethostname(), stated], dist)
    hashed = {}
    for name in files_to_hash(everyone, dist.rank):
        try:
            hashed[name] = str(manifest.entry_of(opened.folder / name)["sha256"])
        except OSError as error:
            hashed[name] = f"cannot be read ({brief(error)})"
    claims = [*enumerate(theirs for _, theirs in everyone), *enumerate(_exchange(hashed, dist))]
    expected: dict[str, str] = {}
    for rank, values in claims:
        for name, value in values.items():
            unread = " " in value
            if unread or (value and value != expected.setdefault(name, value)):
                where = f" on rank {rank}" if dist.world_size > 1 else ""
                why = value if unread else "sha256 differs"
                return f"{opened.folder.name} is damaged ({name}: {why}{where})"
    return ""


def files_to_hash(everyone: Sequence[tuple[str, Collection[str]]], rank: int) -> list[str]:
    """Returns the files that this rank hashes, given the host and the files of every rank.

    Each host hashes each file that its ranks read, once: by its number among the files of all
    ranks, so that ranks which read different files agree on who does.
    """
    host = everyone[rank][0]
    mine = []
    for number, name in enumerate(sorted({name for _, files in everyone for name in files})):
        readers = [
            each for each, (at, files) in enumerate(everyone) if at == host and name in files
        ]
        if readers and readers[number % len(readers)] == rank:
            mine.append(name)
    return mine


def _exchange(value: Any, dist: Dist) -> list[Any]:
    return [json.loads(text) for text in dist.all_gather_text(json.dumps(value))]


def _weights_to_evaluate(path: Path) -> Start:
    """The weights that `checkpoint` names."""

    def read(folder: Path) -> Start:
        # not all of it: an evaluation does not go on with that run, at W&B neither
        meta = reader.read_meta(folder)
        return Start(folder, meta={key: meta[key] for key in ("step", "frozen") if key in meta})

    return Start(path) if reader.is_weights(path) else reader.reading(path, read)


@said_of("checkpoint_path")
def _own_or_named(config: DictConfig, say: Callable[[str], None]) -> Start:
    directory = Path(config.checkpoint_path)
    own = reader.newest_whole(directory / "checkpoints", say, hashed=False)
    meta = reader.read_meta(own) if own else {}
    elsewhere = config.resume not in NO_PATH and meta.get("resumed_from") != config.resume
    # else it has begun there already, and been interrupted since
    if elsewhere and (there := _at(config, own)) is not None:
        return there
    if own is not None:
        return _same_run(Start(own, True, meta), config, directory)
    if steps_in(directory / "checkpoints"):
        raise ConfigError(f"checkpoint_path={directory}: no checkpoint there is whole; {AFRESH}")
    try:  # interrupted before its first checkpoint, a run begins again in its own directory
        return Start(
            continues=not _differences(config_of(read_text(directory / "config.yaml")), config)
        )
    except (OSError, ValueError):
        return Start()


@said_of("resume")
def _at(config: DictConfig, own: Path | None) -> Start | None:
    """The checkpoint that `resume` names; None if the run resumes from its own."""
    path, directory = Path(config.resume), Path(config.checkpoint_path)
    if any(
        _same(path, own_path)
        for own_path in (directory, directory / "checkpoints", directory / "checkpoints" / "latest")
    ):
        return None
    if reader.is_weights(path):
        raise ConfigError(
            f"resume={path}: a file of weights alone; use init_from={path} to begin with them"
        )

    def read(folder: Path) -> Start | None:
        folder = _real(folder)
        if own is not None and _same(folder, folder_or_aside(own)):
            return None
        if folder.is_relative_to(_real(directory)):
            raise ConfigError(
                f"resume={path}: lies in this run's own directory, and the run goes on from its"
                f" newest; {ELSEWHERE}"
            )
        if problem := reader.verify(folder, hashed=False):
            raise ConfigError(
                f"resume={path}: {folder.name} is damaged ({problem}); give another step_* folder"
            )
        return _same_run(Start(folder, meta=reader.read_meta(folder)), config, folder)

    return reader.reading(path, read)


def _instead(
    start: Start, trouble: str, config: DictConfig, say: Callable[[str], None], tries: int
) -> Start:
    """Returns the start to use in place of a whole checkpoint that does not fit."""
    directory, name = Path(config.checkpoint_path), f"step_{start.step}"
    unfit = trouble if trouble.startswith(f"{name} is ") else f"{name} does not fit ({trouble})"
    if config.eval_only:
        latest = _weights_to_evaluate(Path(config.checkpoint)) if tries else start
        if latest.folder == start.folder:
            raise ConfigError(f"checkpoint={start.folder}: {trouble}")
        return latest
    if start.continues:
        own = reader.newest_whole(directory / "checkpoints", say, start.step, hashed=False)
        if own is None:
            raise ConfigError(
                f"checkpoint_path={directory}: no checkpoint there fits ({name}: {trouble});"
                f" {AFRESH}"
            )
        say(f"checkpoint {unfit}; going back to {own.name}")
        return _same_run(Start(own, True, reader.read_meta(own)), config, directory)
    there = _at(config, None) if tries else None
    if there is None or there.folder == start.folder:
        raise ConfigError(f"resume={config.resume}: {unfit}; give another step_* folder")
    return there


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises for links that lead to themselves


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _same_run(start: Start, config: DictConfig, where: Path) -> Start:
    """A start from a checkpoint of this very run, if it is one."""
    if changed := _differences(config_of(start.meta["config"]), config):
        now = " ".join(f"{key}={short(new)}" for key, (_, new) in changed.items())
        then = " ".join(f"{key}={short(old)}" for key, (old, _) in changed.items())
        raise ConfigError(
            f"{now}: the run in {where} has {then}; keep that, choose another run_name, "
            "add resume=false to begin again, or init_from to begin with its weights"
        )
    # Said in every checkpoint from now on: what the command names is then behind the run, and must
    # not be begun with again.
    named = {"resumed_from": str(config.resume)} if config.resume not in NO_PATH else {}
    return replace(start, meta={**start.meta, **named})


def _differences(saved: Mapping[Any, Any], config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that change the run, with both values; a key that only one side has came or went with
    the code.
    """
    now: Any = OmegaConf.to_container(config)
    fields = fields_of(now)
    old, new = (run_values(side, fields, SAME_RUN, MAY_CHANGE) for side in (dict(saved), now))
    # auto became the old one
    changed = {
        key: (old[key], new[key])
        for key in new
        if key in old and new[key] not in (old[key], "auto")
    }
    # what follows a root key is not said twice
    return {key: pair for key, pair in changed.items() if "." not in key} or changed
