"""Where a run begins: afresh, where it ended, or at a checkpoint that was named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from utils.checkpoint import reader, snapshot
from utils.checkpoint.meta import config_of
from utils.checkpoint.stepfolders import identity, resolved, steps_in
from utils.command.config import NOT_THE_RUN
from utils.errors import ConfigError, said_of
from utils.files import read_text
from utils.ranks.distributed import Dist
from utils.rundir.folders import MARKS
from utils.rundir.status import started_again

# A run may become longer; where its data lies does not matter, because its fingerprint is compared.
MAY_CHANGE = (*NOT_THE_RUN, "epochs", "max_steps", "data_path", "data_paths")

AFRESH = "add resume=false to move all that aside and begin again"
ELSEWHERE = "give another run_name (or checkpoint_path) to begin from there"


@dataclass(frozen=True)
class Start:
    """What a run finds of itself."""

    folder: Path | None = None  # the checkpoint to go on from; None: the beginning
    continues: bool = False  # the run directory is this run's own; else it is moved aside
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.meta.get("step", 0)


def find(config: DictConfig, dist: Dist, say: Callable[[str], None]) -> Start:
    """Rank 0 looks and decides, every rank gets its decision."""
    found = Start()
    with dist.agreed():
        # what a launcher starts again has heeded `resume=false` already, if it came so far
        if dist.is_main and not config.eval_only and (config.resume is not False or started_again(Path(config.checkpoint_path))):
            found = _look(config, say)
        if dist.is_main and config.init_from and found == Start():
            _spare(Path(config.init_from), config)
    return _told(found, config, dist)


def take_up(job: Any, start: Start) -> Start:
    """Load what the run begins with, on all ranks the same. A checkpoint that does not fit is told, and the one before it taken."""
    config, dist, tries = job.cfg, job.dist, reader.TRIES
    if config.eval_only:
        _evaluated(job)
    while start.folder is not None:
        with dist.agreed():
            check_fits(start, config, job.source.spec.fingerprint, job.total_steps)
        if not (trouble := _trouble(dist, partial(snapshot.restore, job, start.folder, start.meta))):
            break
        found, tries = Start(), tries - 1
        with dist.agreed():
            if dist.is_main:
                found = _instead(start, trouble.replace(f"checkpoint={start.folder}: ", ""), config, job.run.say, tries)
        start = _told(found, config, dist)
    return start


def check_fits(start: Start, config: DictConfig, fingerprint: str, total_steps: int) -> None:
    """The data must be the same, and the length must not end before the checkpoint."""
    if start.folder is None:
        return
    if start.meta.get("fingerprint") != fingerprint:
        raise ConfigError(
            f"data_path={config.data_path}: not the data of the run in {start.folder}; use that, or init_from to begin with its weights"
        )
    if total_steps < start.step:
        key = "epochs" if config.max_steps is None else "max_steps"
        raise ConfigError(f"{key}={config[key]}: that is {total_steps} steps, and the run has done {start.step}; raise {key}")


def is_finished(start: Start, total_steps: int) -> bool:
    """Whether nothing is left to do, not even an evaluation."""
    return start.continues and start.step == total_steps and not start.meta.get("evaluation_due", True)


def _told(found: Start, config: DictConfig, dist: Dist) -> Start:
    """Rank 0's start on every rank."""
    folder, continues = (dist.broadcast_text(text) for text in (str(found.folder or ""), "yes" if found.continues else ""))
    if not folder:
        return Start(None, bool(continues))
    with dist.agreed(), said_of("checkpoint_path" if continues else "resume"):
        meta = reader.read_meta(Path(folder))
    # Told in every checkpoint from now on: what the command names is then behind the run, and must not be begun with again.
    named = config.resume not in ("auto", False)
    return Start(Path(folder), bool(continues), {**meta, "resumed_from": str(config.resume)} if named else meta)


def _trouble(dist: Dist, load: Callable[[], None]) -> str:
    """Why a checkpoint cannot be loaded on some rank, in the words of the first one; the same on all."""
    problem = ""
    with dist.agreed():
        try:
            load()
        except ConfigError as error:
            problem = str(error)
    return next(filter(None, dist.all_gather_text(problem)), "")


def _evaluated(job: Any) -> None:
    """The weights that `checkpoint` means. Rank 0 looks: beside a run that goes on, every rank would find a newest of its own."""
    path, where, trouble = Path(job.cfg.checkpoint), "", ""
    for _ in range(reader.TRIES):
        before, found = where, path
        with job.dist.agreed():
            if job.dist.is_main and not reader.is_weights(path):
                with reader.readable(path):
                    found = reader.step_folder(path)
        where = job.dist.broadcast_text(str(found))
        if where == before:
            break
        if not (trouble := _trouble(job.dist, partial(snapshot.load_weights, job, where))):
            return
    raise ConfigError(trouble)


@said_of("checkpoint_path")
def _look(config: DictConfig, say: Callable[[str], None]) -> Start:
    directory = Path(config.checkpoint_path)
    own = reader.newest_whole(directory / "checkpoints", say)
    meta = reader.read_meta(own) if own else {}
    elsewhere = config.resume not in ("auto", False) and meta.get("resumed_from") != config.resume
    # else it has begun there already, and been interrupted since
    if elsewhere and (there := _at(config, own)) is not None:
        return there
    if own is not None:
        _check_same_run(meta, config, directory)
        return Start(own, True, meta)
    if steps_in(directory / "checkpoints"):
        raise ConfigError(f"checkpoint_path={directory}: no checkpoint there is whole; {AFRESH}")
    try:  # interrupted before its first checkpoint, a run begins again in its own directory
        return Start(continues=not _differences(config_of(read_text(directory / "config.yaml")), config))
    except (OSError, ValueError):
        return Start()


@said_of("resume")
def _at(config: DictConfig, own: Path | None) -> Start | None:
    """The checkpoint that `resume` names, read again where its run deletes it meanwhile; None: the run goes on with its own."""
    path, directory = Path(config.resume), Path(config.checkpoint_path)
    if any(_same(path, place) for place in (directory, directory / "checkpoints", directory / "checkpoints" / "latest")):
        return None
    for _ in range(reader.TRIES):
        with reader.readable(path):
            if reader.is_weights(path):
                raise ConfigError(f"resume={path}: a file of weights alone; use init_from={path} to begin with them")
            folder = _real(reader.step_folder(path))
        if own is not None and _same(folder, resolved(own)):
            return None
        if folder.is_relative_to(_real(directory)):
            raise ConfigError(f"resume={path}: lies in this run's own directory, and the run goes on from its newest; {ELSEWHERE}")
        found = identity(folder)
        if not (problem := reader.verify(folder)):
            _check_same_run(reader.read_meta(folder), config, folder)
            return Start(folder)
        if identity(folder) == found:
            raise ConfigError(f"resume={path}: {folder.name} is damaged ({problem}); give another step_* folder")
    raise reader.deleted_while_read(path)


def _instead(start: Start, trouble: str, config: DictConfig, say: Callable[[str], None], tries: int) -> Start:
    """What to begin with in place of a checkpoint that is whole and does not fit."""
    directory, name = Path(config.checkpoint_path), f"step_{start.step}"
    if start.continues:
        own = reader.newest_whole(directory / "checkpoints", say, before=start.step)
        if own is None:
            raise ConfigError(f"checkpoint_path={directory}: no checkpoint there fits ({name}: {trouble}); {AFRESH}")
        say(f"checkpoint {name} does not fit ({trouble}); going back to {own.name}")
        meta = reader.read_meta(own)
        _check_same_run(meta, config, directory)
        return Start(own, True, meta)
    there = _at(config, None) if tries else None
    if there is None or there.folder == start.folder:
        raise ConfigError(f"resume={config.resume}: {name} does not fit ({trouble}); give another step_* folder")
    return there


def _spare(weights: Path, config: DictConfig) -> None:
    """Weights that would be moved aside with the former run: started again, the same command would not find them."""
    directory = Path(config.checkpoint_path)
    if _real(weights).is_relative_to(_real(directory)) and any(os.path.exists(directory / mark) for mark in MARKS):
        raise ConfigError(f"init_from={weights}: lies in this run's own directory, which is to be moved aside; {ELSEWHERE}")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises for links that lead to themselves


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _check_same_run(meta: Mapping[str, Any], config: DictConfig, where: Path) -> None:
    if changed := _differences(config_of(meta["config"]), config):
        now = " ".join(f"{key}={new}" for key, (_, new) in changed.items())
        then = " ".join(f"{key}={old}" for key, (old, _) in changed.items())
        raise ConfigError(
            f"{now}: the run in {where} has {then}; keep that, choose another run_name, "
            "add resume=false to begin again, or init_from to begin with its weights"
        )


def _differences(saved: Mapping[Any, Any], config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that change the run, with both values. A key that only one side knows came or went with the code."""
    old, new = (dict(_leaves(side)) for side in (saved, OmegaConf.to_container(config)))
    changed = {key: (old[key], new[key]) for key in new if key in old and old[key] != new[key]}
    return {key: pair for key, pair in changed.items() if "." not in key} or changed  # what follows a root key is not told twice


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if key in MAY_CHANGE and (not prefix or prefix == "data."):
            continue
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
