"""When checkpoints are written, what ranks tell each other about it, and that the last one is on the disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from utils.checkpoint.snapshot import snapshot
from utils.checkpoint.writer import Saver
from utils.errors import RunError
from utils.ranks import signals

FAILED_SAVES = 3  # in a row: then the run could not be continued, and stops
NOTICES = len(signals.flags()) + 3  # numbers that every rank sends along with its gradients


class Keeper:
    """Saves a job by steps, by the clock, and when it is asked to stop."""

    def __init__(self, job: Any, saved_step: int) -> None:
        self._job, self._cfg = job, job.cfg
        self._saver = Saver(job.run.directory / "checkpoints", job.dist, job.run.say, job.cfg.keep)
        self._saved_step, self._saved_at = saved_step, time.monotonic()
        self._best_before: float | None = None
        self._best_step = -1
        self.take_stall_s = self._saver.take_stall_s
        if self._cfg.objective_metric:  # the user may not think of a sign
            job.run.say(f"the best checkpoint is the one with the {'lowest' if job.headline.lower else 'highest'} {job.headline.name}")

    def notices(self) -> list[float]:
        """What this rank has to tell: signals, that it is time to save (by rank 0's clock), that saving fails, that all is lost."""
        minutes = self._cfg.checkpoint_minutes
        due = self._job.dist.is_main and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        lost = bool(self._job.run.lost())
        return [*signals.flags(), float(due), float(self._saver.failures >= FAILED_SAVES), float(lost)]

    def heed(self, told: Sequence[float]) -> tuple[int, bool]:
        """From the sums over ranks: the signal to stop by, or 0, and whether it is time to save."""
        *stop, due, failing, lost = told
        if failing or lost:
            self._give_up("its directory was gone for a moment" if lost else f"{FAILED_SAVES} saves in a row failed")
        return signals.agreed(stop), bool(due)

    def save_if(self, wanted: bool, stopping: bool, evaluated: bool) -> None:
        """Save what is wanted or the best, what the interval asks for, and whatever a stopping run has not saved yet."""
        step, interval = self._job.step, self._cfg.checkpoint_interval
        better = evaluated and self._is_best()
        periodic = interval is not None and step > 0 and step % interval == 0
        if wanted or better or (step != self._saved_step and (stopping or periodic)):
            self._save(better)

    def settle(self) -> None:
        """Wait until the last checkpoint is on the disk; a run must not end without it."""
        for _ in range(FAILED_SAVES):
            # Asked of every rank: rank 0 hosts the store that the others hear by, and must not leave before they have.
            told = self._job.dist.all_gather_text(self._saver.wait())
            if not (problem := next(filter(None, told), "")):
                return
            if any(self._job.dist.all_gather_text(self._job.run.lost())):
                break
            self._save(self._best_step == self._job.step)
        self._give_up(f"step {self._job.step} could not be saved ({problem})")

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # what is being written is finished; after a failure other ranks may be dead, and are not waited for long
        self._saver.close(None if kind is None else 5.0)

    def _is_best(self) -> bool:
        """Compared with what is on the disk: a better one that could not be saved does not count."""
        self._forget_lost_best()
        job = self._job
        # a checkpoint of older code has the name alone
        before = job.best if job.objective.judged_by(job.best_of) == job.headline else None
        if not job.headline.improves(job.results, before):
            return False
        self._best_before, self._best_step = before, job.step
        job.best, job.best_of = job.results[job.headline.name], str(job.headline)
        return True

    def _forget_lost_best(self) -> None:
        self._saver.wait()
        if self._saver.best_failed:
            self._job.best, self._saver.best_failed = self._best_before, False

    def _save(self, better: bool) -> None:
        if not better:
            self._forget_lost_best()
        self._saver.save(self._job.step, *snapshot(self._job), better)
        self._saved_step, self._saved_at = self._job.step, time.monotonic()

    def _give_up(self, why: str) -> None:
        there = f"checkpoint_path={self._job.run.directory}: {why}; make room there, and start the run again to go on"
        raise RunError(self._job.run.lost() or there)  # rank 0 knows and speaks
