"""Runs the jobs of a sweep for Hydra: as processes, or by all ranks together if a launcher started
several.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from utils.errors import ConfigError, Stopped, brief
from utils.files import write_whole
from utils.ranks import signals
from utils.ranks.launchers import Launch
from utils.rundir.status import COPY, FINAL
from utils.sweep.children import Children, gpus_here, shares
from utils.sweep.jobs import SETTINGS, Job, differing, prepare, settings_of
from utils.sweep.results import result_in
from utils.sweep.summary import FAILED, Row, table, write

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass
class Multirun:
    """One multirun: its jobs, and how those of this process ended."""

    launch: Launch
    options: list[str]  # those of the command line that each job needs as well
    jobs: list[Job] = field(default_factory=list)
    known: dict[int, str] = field(default_factory=dict)  # states that run directories do not tell
    failures: dict[int, int] = field(default_factory=dict)  # exit statuses
    folder: Path | None = None
    rows: list[Row] = field(default_factory=list)
    advanced: list[Job] = field(default_factory=list)  # jobs that made progress in this sweep

    def plan(
        self, context: HydraContext, master: DictConfig, overrides: Sequence[str], number: int
    ) -> Job:
        """Composes and checks a job for as many ranks as it will have."""
        job = prepare(context, master, overrides, number, self.launch)
        ranks = job.config[SETTINGS].ranks if job.config is not None and self.alone else 1
        return (
            job
            if ranks == 1
            else prepare(context, master, overrides, number, Launch(world_size=ranks))
        )

    @property
    def alone(self) -> bool:
        """Whether this is a single process, which starts others."""
        return self.launch.world_size == 1

    def children(self, settings: DictConfig, at_once: int, device: str) -> Children:
        """Returns what runs `at_once` jobs at a time."""
        gpus = [] if device == "cpu" or at_once * settings.ranks == 1 else gpus_here(os.environ)
        if settings.ranks <= len(gpus) < at_once * settings.ranks:
            most, number = (
                max(1, len(gpus) // settings.ranks),
                f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}",
            )
            signals.say(
                f"sweep.jobs={at_once}: jobs share {number}; with sweep.jobs={most} each would have"
                " its own"
            )
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        return Children(
            self.options, shares(at_once, settings.ranks, os.environ, gpus, cores), settings.ranks
        )

    def refuse(self, job: Job) -> None:
        """Reports a job whose configuration is wrong; the next one follows."""
        signals.say(f"error: {job.name}: {job.error}")
        self.failures[job.number], self.known[job.number] = 2, FAILED

    def record_end(self, job: Job, status: int) -> None:
        """Records how a job's process ended."""
        state = job.status_row().get("state")
        if state == "requeue" or (state in FINAL and not status and not job.config.eval_only):  # type: ignore[union-attr]
            self.advanced.append(job)  # not an evaluation: it starts again from nothing
        if status:
            self.failures[job.number] = status
            if status not in signals.STATUS.values():
                self.known[job.number] = FAILED
        self.write()

    def write(self) -> None:
        """Writes the table, on rank 0."""
        if self.launch.rank == 0 and self.folder is not None and self.jobs:
            self.rows = write(self.folder, self.jobs, self.known)

    def finish(self) -> int:
        """Prints how all jobs ended; returns the exit status of the failed job with the lowest
        number.
        """
        self.write()
        if self.launch.rank == 0 and self.rows:
            print(f"\n{table(self.rows)}\n\nsummary: {self.folder}/summary.csv", flush=True)
        if not self.failures:
            return 0
        failed = sorted(self.failures)
        numbers = ", ".join(f"job {number}" for number in failed)
        signals.say(
            f"{len(failed)} of {len(self.jobs)} jobs failed: {numbers}; the same command goes on"
            " with what is not finished"
        )
        return self.failures[failed[0]]

    def conclude(self, error: Exception | None, status: int = 0) -> None:
        """Writes how the sweep ended to the file that a batch script named, if any."""
        if not (copy := os.environ.get(COPY)):
            return
        first = next(
            (job for job in self.jobs if job.number == min(self.failures, default=0)), None
        )
        reason = ""
        if error:
            reason = brief(error)
        elif first:
            reason = first.error or first.status_row().get("reason", "")
        if isinstance(error, Stopped):
            state, status = (
                "requeue" if error.signum == signal.SIGUSR1 and self.advanced else "stopped",
                signals.STATUS[error.signum],
            )
            if (
                state == "stopped" and error.signum == signal.SIGUSR1
            ):  # it would be requeued for ever
                reason = "SIGUSR1: no job came further, so not to be run again"
        else:
            state = "failed" if error or status else "finished"
            status = 2 if isinstance(error, ConfigError) else 1 if error else status
        try:
            write_whole(
                Path(copy),
                json.dumps({"state": state, "reason": reason, "exit_status": status}, indent=1)
                + "\n",
            )
        except OSError as failure:
            signals.say(f"{COPY}={copy}: cannot be written ({brief(failure)})")


class Local(Launcher):
    """`hydra/launcher=local`."""

    multirun: Multirun  # set where this is registered

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context, self.task, self.master = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Checks all jobs, then runs them."""
        multirun, sweeper = self.multirun, self.master.hydra.sweeper
        jobs = [
            multirun.plan(self.context, self.master, given, initial_job_idx + number)
            for number, given in enumerate(job_overrides, 1)
        ]
        settings = settings_of(jobs)
        multirun.jobs += jobs
        multirun.folder = Path(self.master.hydra.sweep.dir)
        chosen = jobs
        if settings.only is not None:
            if sweeper._target_ != BASIC or sweeper.max_batch_size is not None:
                raise ConfigError(
                    f"sweep.only={settings.only}: this sweeper decides on jobs as it goes; leave"
                    " it out"
                )
            if settings.only > len(jobs):
                raise ConfigError(
                    f"sweep.only={settings.only}: the sweep has {len(jobs)}"
                    f" job{'s' if len(jobs) > 1 else ''}"
                )
            chosen = [jobs[settings.only - 1]]
        if multirun.alone:
            self._run_children(chosen, settings)
        values = (
            {job.number: result_in(job.directory).last for job in chosen}
            if multirun.alone
            else self._run_here(chosen, settings)
        )
        # Hydra's basic sweeper would end the sweep at the first job that failed
        status = multirun.failures if sweeper._target_ != BASIC else {}
        return [job.job_return(values[job.number], status.get(job.number, 0)) for job in chosen]

    def _run_children(self, jobs: Sequence[Job], settings: DictConfig) -> None:
        multirun = self.multirun
        for job in jobs:
            if job.error:
                multirun.refuse(job)
        right = [job for job in jobs if not job.error]
        multirun.write()
        if not right:
            return
        device = right[0].config.device  # type: ignore[union-attr]
        children = multirun.children(settings, min(settings.jobs, len(right)), device)
        numbers, left = (job.number for job in multirun.jobs), list(right)
        titles = dict(zip(numbers, differing(multirun.jobs), strict=True))

        def next_job(busy: Collection[Path | None]) -> Job | None:
            if (
                not left
                or (multirun.failures and settings.on_error == "stop")
                or left[0].directory in busy
            ):
                return None  # if two jobs are the same run, the second waits
            job = left.pop(0)
            print(f"{job.name} of {len(multirun.jobs)}: {titles[job.number]}", flush=True)
            return job

        children.run(next_job, multirun.record_end)
        if left:
            signals.say(
                f"sweep.on_error=stop: {len(left)} job{' was' if len(left) == 1 else 's were'} not"
                " started"
            )

    def _run_here(self, jobs: Sequence[Job], settings: DictConfig) -> dict[int, Any]:
        """Runs the jobs on all ranks together; they fail together, too."""
        multirun = self.multirun
        for key in ("jobs", "ranks"):
            if settings[key] > 1:
                raise ConfigError(
                    f"sweep.{key}={settings[key]}: {multirun.launch.world_size} ranks run jobs"
                    " together; start one process for that"
                )
        if wrong := next((job for job in jobs if job.error), None):
            raise ConfigError(wrong.error)
        values = {}
        for job in jobs:
            try:
                done = run_job(
                    self.task, job.composed, "hydra.sweep.dir", "hydra.sweep.subdir", self.context
                )
                values[job.number] = done.return_value
            except SystemExit:
                if multirun.launch.rank == 0 and len(jobs) > 1:
                    signals.say(
                        f"the sweep ends with {job.name} of {len(multirun.jobs)}; the same command"
                        " goes on with it"
                    )
                raise
            finally:
                multirun.write()
        multirun.finish()
        return values
