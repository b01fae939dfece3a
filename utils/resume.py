"""Where a run begins: afresh, where it ended, or at a checkpoint that was named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from utils import checkpoint
from utils.config import NOT_THE_RUN
from utils.distributed import Dist
from utils.errors import ConfigError, said_of
from utils.status import started_again

# A run may become longer; where its data lies does not matter, because its fingerprint is compared.
MAY_CHANGE = (*NOT_THE_RUN, "epochs", "max_steps", "data_path", "data_paths")


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
    folder = dist.broadcast_text(str(found.folder or ""))
    continues = dist.broadcast_text("yes" if found.continues else "") == "yes"
    if not folder:
        return Start(None, continues)
    with dist.agreed(), said_of("checkpoint_path"):
        meta = checkpoint.read_meta(Path(folder))
    return Start(Path(folder), continues, meta if continues else {**meta, "resumed_from": str(config.resume)})


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


def _look(config: DictConfig, say: Callable[[str], None]) -> Start:
    directory = Path(config.checkpoint_path)
    own = checkpoint.newest_whole(directory / "checkpoints", say)
    meta = checkpoint.read_meta(own) if own else {}
    if config.resume not in ("auto", False) and meta.get("resumed_from") != config.resume:
        return _at(_named(Path(config.resume)), config)
    # else it has begun there already, and been interrupted since
    if own is not None:
        _check_same_run(OmegaConf.create(meta["config"]), config, directory)
        return Start(own, True, meta)
    if checkpoint.steps_in(directory / "checkpoints"):
        raise ConfigError(
            f"checkpoint_path={directory}: no checkpoint there is whole; add resume=false to move all that aside and begin again"
        )
    # Interrupted before its first checkpoint, a run begins again in its own directory.
    former = _read_config(directory / "config.yaml")
    return Start(continues=former is not None and not _differences(former, config))


def _read_config(file: Path) -> DictConfig | None:
    """What a run said that it was, if that can be read still."""
    try:
        found = OmegaConf.load(file) if file.is_file() else None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError):
        return None
    return found if isinstance(found, DictConfig) else None


@said_of("resume")
def _named(path: Path) -> Path:
    if path.is_file():
        raise ConfigError(f"resume={path}: a file of weights alone; use init_from={path} to begin with them")
    return checkpoint.step_folder(path).resolve()


def _at(folder: Path, config: DictConfig) -> Start:
    if problem := checkpoint.verify(folder):
        raise ConfigError(f"resume={config.resume}: {folder.name} is damaged ({problem}); give another step_* folder")
    _check_same_run(OmegaConf.create(checkpoint.read_meta(folder)["config"]), config, folder)
    return Start(folder)


def _check_same_run(saved: Any, config: DictConfig, where: Path) -> None:
    if changed := _differences(saved, config):
        now = " ".join(f"{key}={new}" for key, (_, new) in changed.items())
        then = " ".join(f"{key}={old}" for key, (old, _) in changed.items())
        raise ConfigError(
            f"{now}: the run in {where} has {then}; keep that, choose another run_name, "
            "add resume=false to begin again, or init_from to begin with its weights"
        )


def _differences(saved: Any, config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that change the run, with both values. A key that only one side knows came or went with the code."""
    old, new = (dict(_leaves(OmegaConf.to_container(side))) for side in (saved, config))
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
