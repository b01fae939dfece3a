"""The run directory: what a run writes, and what it says. Rank 0 writes; everywhere else every method does nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from utils import git
from utils.distributed import Dist
from utils.errors import ConfigError
from utils.progress import ProgressBar
from utils.tracking import Tracker, check_mode

# What tells a run directory from a folder that something else (Hydra, a user) has made.
MARKS = ("config.yaml", "metrics.jsonl", "log.txt", "checkpoints")


class Run:
    """Directory, log, metrics, W&B and progress bar of one job."""

    def __init__(self, directory: Path, dist: Dist, quiet: bool = False) -> None:
        self.directory = directory
        self.dist = dist
        self._bar = None if quiet or not dist.is_main else ProgressBar(launcher=dist.launcher)
        self._tracker = Tracker(self.say)
        self._metrics: TextIO | None = None
        self._log: TextIO | None = None

    @classmethod
    def open(cls, directory: Path, config_text: str, dist: Dist, wandb_settings: Mapping[str, Any], quiet: bool = False) -> Run:
        """A run that has begun; `quiet` writes files only."""
        run = cls(Path(directory), dist, quiet)
        run.begin(config_text, wandb_settings)
        return run

    def begin(self, config_text: str, wandb_settings: Mapping[str, Any]) -> None:
        """Make the directory on rank 0, moving a former run of that name aside; nothing is written before."""
        check_mode(str(wandb_settings.get("mode", "auto")))  # on all ranks alike, before rank 0 writes anything
        if not self.dist.is_main:
            return
        moved = _make(self.directory)
        (self.directory / "config.yaml").write_text(config_text, encoding="utf-8")
        self._metrics = _append(self.directory / "metrics.jsonl")
        self._log = _append(self.directory / "log.txt")
        if moved:
            self.say(f"the former run of this name is now {moved}")
        _record_code(self.directory)
        name, project = wandb_settings.get("name") or self.directory.name, wandb_settings.get("project")
        self._tracker.start(self.directory, config_text, str(wandb_settings.get("mode", "auto")), project, name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the same to W&B."""
        if self._metrics is None:
            return
        row = {"step": step, "time": round(time.time(), 3), **{name: _strict(value) for name, value in metrics.items()}}
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()
        self._tracker.log(step, metrics)

    def say(self, text: str) -> None:
        """A line to the terminal and to log.txt."""
        if self._bar is not None:
            self._bar.say(text)
        if self._log is not None:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            self._log.flush()

    def progress(
        self, step: int, total: int, loss: float | None, headline_name: str, headline_value: float | None, examples_per_s: float | None
    ) -> None:
        """Move the progress bar; None stands for a value that is not known yet."""
        if self._bar is not None:
            self._bar.update(step, total, loss, (headline_name, headline_value), examples_per_s)

    def close(self, ok: bool = True) -> None:
        """End the run, well or failed; more than once does no harm."""
        if self._bar is not None:
            self._bar.close()
        self._tracker.close(ok)
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()
        self._metrics = self._log = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(ok=kind is None)


def _make(directory: Path) -> str:
    """Create the directory; the name to which a former run was moved, if there was one."""
    moved = ""
    try:
        if any((directory / mark).exists() for mark in MARKS):
            number = 1
            while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
                number += 1
            directory.rename(aside)
            moved = aside.name
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"checkpoint_path={directory}: cannot be made ({error.strerror}); give a folder you may write to") from None
    return moved


def _append(file: Path) -> TextIO:
    return open(file, "a", encoding="utf-8", errors="surrogateescape")


def _record_code(directory: Path) -> None:
    if summary := git.summary():
        (directory / "git.txt").write_text(summary)
        (directory / "uncommitted.diff").write_text(git.uncommitted(), errors="surrogateescape")


def _strict(value: Any) -> float | int | None:
    """A number as strict JSON knows it; NaN and the infinities it does not."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
