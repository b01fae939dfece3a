"""Decides when to save, and waits until the last checkpoint is on the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from utils.checkpoint.reader import digest
from utils.checkpoint.registry import Registry
from utils.checkpoint.resume import Start
from utils.checkpoint.writer import Writer
from utils.command.root import Config
from utils.errors import RunError
from utils.ranks import signals
from utils.rundir.directory import RunDirectory

# bytes of the largest checkpoint that is hashed for the report
DIGEST_BYTES = 64 << 20
EXACT_BYTES = 1 << 30  # with exact=true, where digests are compared
FAILED_SAVES = 3  # in a row, after which the run stops
REMEDY = "make room there"


def improves(metric: str, results: Mapping[str, float], best: float | None) -> bool:
    """True if a result is better than the best so far; NaN or none is not."""
    value = results.get(metric.removeprefix("-"), math.nan)
    if math.isnan(value):
        return False
    return best is None or (value < best if metric.startswith("-") else value > best)


class Checkpointer:
    """Saves a run at intervals of steps and of minutes, when it is the best so far, and when it is
    asked to stop. `progress` is what a checkpoint records beside tensors: the step, its results if
    it was evaluated, and more that only the run reads.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        registry: Registry,
        metric: str,
        start: Start,
    ) -> None:
        self._config, self._run, self._registry, self._metric = config, run, registry, metric
        folder = run.directory / "checkpoints"
        self._writer = Writer(folder, run.dist, run.say, config.keep, self._record)
        self._saved_step, self._saved_at = start.step if start.continues else -1, time.monotonic()
        self._best, self._best_of = start.meta.get("best"), start.meta.get("best_of", "")
        self._resumed_from = start.meta.get("resumed_from", "")
        self._best_before: float | None = None
        self._saved_best = False  # whether the last save is of the best
        self.take_stall_s = self._writer.take_stall_s

    def requests(self) -> list[float]:
        """Returns this rank's requests to all others, each 0 or 1: to stop, by signal; to save; and
        to end because saves fail.
        """
        minutes = self._config.checkpoint_minutes
        due = (
            self._run.dist.is_main
            and minutes is not None
            and time.monotonic() - self._saved_at > 60 * minutes
        )
        failing = self._writer.failures >= FAILED_SAVES
        return [*signals.flags, float(due), float(failing)]

    def decide(self, requests: Sequence[float]) -> tuple[int, bool]:
        """Returns the signal that stops the run, or 0, and whether it is time to save.

        Called with the sums of all ranks' requests, so all ranks decide the same. Ends the run if
        too many saves have failed.
        """
        if not any(requests):
            return 0, False
        *flags, due, failing = requests
        if failing:
            self._give_up(f"{FAILED_SAVES} saves in a row failed; {REMEDY}")
        return signals.agreed_signal(flags), bool(due)

    def saves_after(self, step: int) -> bool:
        """True if the step count alone asks for a checkpoint."""
        interval = self._config.checkpoint_interval
        return interval is not None and step > 0 and step % interval == 0

    def save_if(
        self, progress: Mapping[str, Any], wanted: bool, stopping: bool, evaluated: bool
    ) -> None:
        """Saves if `wanted`, if an evaluation was the best so far, if the interval is over, or if
        the run is stopping with unsaved steps.
        """
        better, step = evaluated and self._take_if_best(progress), progress["step"]
        unsaved = step != self._saved_step
        if wanted or better or (unsaved and (stopping or self.saves_after(step))):
            self._save(progress, better)

    def save_unsaved(self, progress: Mapping[str, Any]) -> None:
        """Saves, unless this step is saved already."""
        if progress["step"] != self._saved_step:
            self._save(progress, better=False)

    def wait_until_saved(self, progress: Mapping[str, Any]) -> None:
        """Waits until the last checkpoint is on the disk; a run must not end without it."""
        step = progress["step"]
        problem = self._writer.wait()
        for _ in range(FAILED_SAVES):
            if problem:
                self._save(progress, self._saved_best)
                problem = self._writer.wait()
        if problem:
            self._give_up(f"step {step} could not be saved ({problem}); {REMEDY}")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()  # finishes the checkpoint that is being written

    def _record(self, folder: Path) -> None:
        """Logs a checkpoint that was written, with its digest where that is cheap."""
        size = sum(file.stat().st_size for file in folder.iterdir())
        cheap = size <= (EXACT_BYTES if self._config.exact else DIGEST_BYTES)
        step, sha256 = int(folder.name.removeprefix("step_")), digest(folder) if cheap else None
        self._run.event("checkpoint", step, bytes=size, digest=sha256)

    def _take_if_best(self, progress: Mapping[str, Any]) -> bool:
        """True if this step beats the best checkpoint on the disk; failed saves do not count. It is
        then the best.
        """
        self._forget_lost_best()
        metric, results = self._metric, progress["results"]
        before = self._best if self._best_of == metric else None
        if not improves(metric, results, before):
            return False
        self._best_before = before
        self._best, self._best_of = results[metric.removeprefix("-")], metric
        return True

    def _forget_lost_best(self) -> None:
        if self._saved_best and self._writer.wait():
            self._best, self._saved_best = self._best_before, False

    def _save(self, progress: Mapping[str, Any], better: bool) -> None:
        self._run.check_place()
        if not better:
            self._forget_lost_best()
        best = {"best": self._best, "best_of": self._best_of}
        groups, meta = self._registry.snapshot(
            {**progress, **best, "resumed_from": self._resumed_from}
        )
        self._writer.save(progress["step"], groups, meta, better)
        self._saved_best = better
        self._saved_step, self._saved_at = progress["step"], time.monotonic()

    def _give_up(self, why: str) -> None:
        raise RunError(
            f"checkpoint_path={self._run.directory}: {why}, and start the run again to go on"
        )
