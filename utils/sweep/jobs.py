"""The jobs of a sweep: their configurations and names, and the command that runs one of them."""

from __future__ import annotations

import copy
import glob
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from utils.command import cli
from utils.command.config import check_keys
from utils.command.from_checkpoint import CHOICES, as_override
from utils.command.keys import CONF, read
from utils.errors import ConfigError, RunError, short
from utils.files import ROOT, read_row
from utils.ranks.launchers import Launch
from utils.rundir.status import FILE

SETTINGS = "sweep"  # the keys that say how the sweep is run
EVALUATION = "-evaluation"


@dataclass
class Job:
    """One run of a sweep; if its configuration is wrong, `error` says why."""

    number: int  # from 1
    overrides: list[str]
    composed: DictConfig  # with Hydra's own part
    raw: DictConfig  # without it
    config: DictConfig | None
    error: str = ""
    about: str = ""  # its title, if not the overrides in which jobs differ
    begun: float = 0.0  # when this process started it
    evaluation: Path | None = None  # the directory of an evaluation that this process has started

    @property
    def name(self) -> str:
        return f"job {self.number}"

    @property
    def directory(self) -> Path | None:
        """The run's directory; for an evaluation, the one started here, or else the newest."""
        if self.config is None:
            return None
        if not self.config.eval_only:
            return Path(self.config.checkpoint_path)
        return self.evaluation if self.begun else self._evaluations()[-1]

    def _evaluations(self) -> list[Path]:
        assert self.config is not None
        first, numbers = Path(self.config.checkpoint_path), []
        for path in first.parent.glob(f"{glob.escape(first.name)}-*"):
            with suppress(ValueError):
                numbers.append(int(path.name.removeprefix(f"{first.name}-")))
        return [first, *(first.with_name(f"{first.name}-{number}") for number in sorted(numbers))]

    def locate(self, pid: int | None) -> None:
        """Looks for the directory of an evaluation that this process has started, by its pid."""
        if self.evaluation is None and self.config is not None and self.config.eval_only:
            for path in self._evaluations():
                row = self._status_row(path)
                if row and pid in (None, row.get("pid")):
                    self.evaluation = path

    def status_row(self) -> dict[str, Any]:
        """Returns status.json if it was written since the job was started here, else nothing."""
        return self._status_row(self.directory) if self.directory else {}

    def _status_row(self, directory: Path) -> dict[str, Any]:
        row = read_row(directory / FILE)
        beat = row.get("heartbeat")
        return row if isinstance(beat, int | float) and beat > self.begun > 0 else {}

    def arguments(self) -> list[str]:
        """Returns the arguments with which pretrain.py makes this run alone, under its name."""
        assert self.config is not None
        arguments = [
            override
            for override in self.overrides
            if key_of(override).partition(".")[0] != SETTINGS
        ]
        # an interpolation that Hydra fills in is a name too
        if OmegaConf.is_interpolation(self.raw, "run_name") or self.raw.run_name is not None:
            name = (
                self.config.run_name.removesuffix(EVALUATION)
                if self.config.eval_only
                else self.config.run_name
            )
            arguments.append(f"run_name={as_override(name)}")
        if self.config.eval_only and not CHOICES & {key_of(override) for override in arguments}:
            # naming the net keeps it from taking the configuration in the checkpoint
            arguments.append(f"arch={self.composed.hydra.runtime.choices.arch}")
        return [
            *arguments,
            f"hydra.job.num={self.composed.hydra.job.num}",
            f"hydra.job.id={self.composed.hydra.job.num}",
        ]

    def job_return(self, value: float | None, status: int = 0) -> JobReturn:
        """Returns the value that Hydra's sweepers receive."""
        done = JobReturn(
            overrides=self.overrides, cfg=self.raw, hydra_cfg=self.composed, working_dir=os.getcwd()
        )
        done.task_name, done.status = (
            JobRuntime.instance().get("name"),
            JobStatus.FAILED if status else JobStatus.COMPLETED,
        )
        done._return_value = (
            RunError(f"{self.name} ended with exit status {status}") if status else value
        )
        return done


def prepare(
    context: HydraContext, master: DictConfig, overrides: Sequence[str], number: int, launch: Launch
) -> Job:
    """Composes and checks a job, and names its run."""
    composed = context.config_loader.load_sweep_config(master, list(overrides))
    fixed = find_fixed_keys(_plain(master.hydra.overrides.task))
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number - 1
        # a name that is cut short then still shows what is swept
        composed.hydra.overrides.task = sorted(
            composed.hydra.overrides.task, key=lambda override: key_of(override) in fixed
        )
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    try:
        raw = copy.deepcopy(composed)
        with open_dict(raw):
            del raw["hydra"]
        config, error = None, ""
        try:
            config = cli.resolve_job(raw, launch)
        except ConfigError as wrong:
            error = str(wrong)
        return Job(number, list(overrides), composed, raw, config, error)
    finally:
        HydraConfig.instance().cfg = before


def find_fixed_keys(overrides: Sequence[str]) -> set[str]:
    """Returns the keys of a sweep's overrides that have only one value, however it is written."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {key_of(one.input_line or "") for one in parsed if not one.is_sweep_override()}


def _plain(overrides: Any) -> list[str]:
    """Returns overrides as they were written, with interpolations unresolved."""
    words: Any = OmegaConf.to_container(overrides, resolve=False)
    return words


def settings_of(jobs: Sequence[Job], any_right: bool = True) -> DictConfig:
    """Returns the values of `sweep.*`, which all jobs share. If no job is right, raises the first
    one's error.
    """
    if any_right and all(job.error for job in jobs):
        raise ConfigError(jobs[0].error)
    defaults, rules = read(CONF / "pretrain.yaml")
    given: list[Any] = [OmegaConf.to_container(job.raw[SETTINGS], resolve=True) for job in jobs]
    for key, first in given[0].items():
        if others := [settings[key] for settings in given if settings[key] != first]:
            raise ConfigError(
                f"{SETTINGS}.{key}={short(first)},{short(others[0])}: says how all jobs are run,"
                " and has one value"
            )
    checked: Any = check_keys(
        {SETTINGS: given[0]}, {SETTINGS: OmegaConf.to_container(defaults[SETTINGS])}, rules
    )
    return DictConfig(checked[SETTINGS])


def command(options: Sequence[str], job: Job, ranks: int) -> list[str]:
    """Returns the command that runs a job as a process, or under torchrun."""
    launcher = []
    if ranks > 1:
        signals_to_handle = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            signals_to_handle,
        ]
    return [sys.executable, *launcher, str(ROOT / "pretrain.py"), *options, *job.arguments()]


def key_of(override: str) -> str:
    """Returns the key of an override."""
    return override.partition("=")[0].lstrip("+~")


def differing(jobs: Sequence[Job]) -> list[str]:
    """Returns the overrides in which each job differs from others; all if it differs from none."""
    # of two for one key the last counts
    given = [{key_of(override): override for override in job.overrides} for job in jobs]
    vary = {key for key in set().union(*given) if len({row.get(key) for row in given}) > 1}
    differ_in = [[row[key] for key in row if key in vary] for row in given]
    own = [[row[key] for key in row if key.partition(".")[0] != SETTINGS] for row in given]
    return [
        job.about or " ".join(differ or all_of_job)
        for job, differ, all_of_job in zip(jobs, differ_in, own, strict=True)
    ]
