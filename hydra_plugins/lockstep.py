"""`hydra/launcher=local`: runs the jobs of a sweep as processes of this machine.

Repeating a sweep resumes its jobs, because each job finds its own run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from utils.checkpoint import reader
from utils.command import cli
from utils.errors import ConfigError, RunError, Stopped
from utils.files import write_whole
from utils.ranks import signals
from utils.ranks.launchers import Launch
from utils.rundir.status import STATUS_VARIABLE
from utils.sweep import table
from utils.sweep.children import Children, Job


class Local(Launcher):
    """Checks all jobs, then runs `sweep.jobs` of them at once, each on `sweep.ranks` ranks."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context, self._master = hydra_context, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Runs the jobs to their ends. Hydra calls it once for all, or for each batch of trials."""
        settings = self._master.sweep
        first = initial_job_idx + 1
        batch = [self._job(list(keys), first + i) for i, keys in enumerate(job_overrides)]
        if all(job.error for job in batch):
            raise ConfigError(batch[0].error)
        if settings.only is not None:
            if not 1 <= settings.only <= len(batch):
                raise ConfigError(f"sweep.only={settings.only}: the sweep has {len(batch)} jobs")
            self._jobs = batch
            batch = [batch[settings.only - 1]]
        else:
            self._jobs += batch
        folder = Path(self._master.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [job.row() for job in self._jobs]
        write_whole(folder / table.JOBS, json.dumps(rows, indent=1) + "\n")
        try:
            Children(settings, batch, lambda: table.write_table(folder)).run()
        except Stopped as stopped:
            self._conclude(stopped.signum)
            raise
        finally:
            summary = table.write_table(folder)
        self._conclude(0)
        print(f"\n{summary}\n\nsummary: {folder / table.SUMMARY}", flush=True)
        return [self._returned(job) for job in batch]

    def _job(self, overrides: list[str], number: int) -> Job:
        """Composes and checks a job, for as many ranks as it will have."""
        composed = self._context.config_loader.load_sweep_config(self._master, overrides)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number - 1), number - 1
        # as Hydra does for each job: a configuration may refer to ${hydra:…}
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(composed)
        try:
            raw = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
            launch = Launch(world_size=self._master.sweep.ranks)
            try:
                config = cli.resolve_job(raw, reader.config_in, launch)
            except ConfigError as error:
                return Job(number, overrides, None, str(error))
            return Job(number, overrides, config)
        finally:
            HydraConfig.instance().cfg = before

    def _returned(self, job: Job) -> JobReturn:
        """Returns the value for sweepers, lower is better: the metric that `objective_metric`
        names, as last logged, or its negative.
        """
        done = JobReturn(overrides=job.overrides, working_dir=os.getcwd())
        failed = RunError(
            f"job {job.number} ended with exit status {job.status}; the same command goes on with"
            " the unfinished jobs"
        )
        done.status = JobStatus.FAILED if job.status else JobStatus.COMPLETED
        found = table.result(job.directory) if job.directory else table.Result()
        value = found.value if found.value is None or found.lower else -found.value
        done.return_value = failed if job.status else value
        return done

    def _conclude(self, signum: int) -> None:
        """Writes how the sweep ended to the file that a batch script named: to be run again only if
        a job took steps.
        """
        if not (copy := os.environ.get(STATUS_VARIABLE)):
            return
        failed = next((job for job in self._jobs if job.status), None)
        state, status, reason = "finished", 0, ""
        if signum:
            states = [job.status_row().get("state") for job in self._jobs]
            again = signum == signal.SIGUSR1 and "requeue" in states
            state, status = "requeue" if again else "stopped", signals.STATUS[signum]
        elif failed:
            state, status = "failed", failed.status
            reason = failed.error or failed.status_row().get("reason", "")
        row: dict[str, Any] = {"state": state, "reason": reason, "exit_status": status}
        write_whole(Path(copy), json.dumps(row, indent=1) + "\n")
