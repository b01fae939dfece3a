"""`hydra/sweeper=optuna`: trials are jobs whose values Optuna proposes.

The study's file holds everything, so that a stopped sweep can go on.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from utils.command.config import check_keys
from utils.command.keys import CONF, read
from utils.errors import ConfigError, RunError, brief
from utils.ranks import signals
from utils.rundir.lock import Lock
from utils.sweep.jobs import Job, settings_of
from utils.sweep.launcher import Multirun
from utils.sweep.results import result_in
from utils.sweep.space import Space, space_of

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler

PRUNED = "pruned"
KEYS = "hydra.sweeper"


class Trials(Sweeper):
    """Asks for values, runs jobs and reports their results."""

    multirun: Multirun  # set where this is registered
    context: HydraContext
    space: Space
    study: Study

    def __init__(self, **given: Any) -> None:
        defaults, rules = read(CONF / "hydra" / "sweeper" / "optuna.yaml", KEYS)
        self.keys = check_keys(
            {KEYS: given}, {KEYS: {key: defaults[KEYS][key] for key in given}}, rules
        )[KEYS]
        self.trials: dict[int, Trial] = {}  # by the number of their jobs
        self.evaluations_seen: dict[int, int] = {}  # by the number of the job
        self.pruned: set[int] = set()
        self.exhausted = False  # whether all combinations have had a trial

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context, self.master = hydra_context, config

    def sweep(self, arguments: list[str]) -> None:
        """Finishes the trials that an earlier start left, then tries more."""
        multirun = self.multirun
        if not multirun.alone:
            raise ConfigError(
                "hydra/sweeper=optuna: starts trials itself; start one process instead of"
                f" {multirun.launch.world_size} ranks"
            )
        if self.master.hydra.launcher._target_ != "hydra_plugins.lockstep.Local":
            raise ConfigError("hydra/sweeper=optuna: starts trials itself; remove hydra/launcher")
        optuna = _optuna()
        self.space = space_of(arguments, self.context.config_loader)
        corners = [
            multirun.plan(self.context, self.master, self.space.corner(end), 1) for end in (0, -1)
        ]
        if corners[0].error and corners[0].error == corners[1].error:
            raise ConfigError(corners[0].error)  # it does not depend on the values
        settings = settings_of(corners, any_right=False)
        if settings.only is not None:
            raise ConfigError(
                f"sweep.only={settings.only}: Optuna decides on trials as it goes; leave it out"
            )
        multirun.folder = Path(self.master.hydra.sweep.dir)
        multirun.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(multirun.folder / "study")
        if other := lock.acquire():
            raise ConfigError(
                f"{multirun.folder}: the same sweep is going on ({other}); it needs no second"
                " process"
            )
        try:
            self._open(optuna)
            self._run(settings, corners[0].raw.device)
        except _errors(optuna) as error:
            raise RunError(
                f"{self._where()}: Optuna's storage fails ({_first_line(error)}); the same command"
                " goes on"
            ) from None
        finally:
            lock.release()

    def _where(self) -> str:
        return (
            f"{KEYS}.storage={self.keys['storage']}"
            if self.keys["storage"]
            else f"{self.multirun.folder}/study.db"
        )

    def _open(self, optuna: Any) -> None:
        """Opens the study of this sweep, or creates it."""
        assert self.multirun.folder is not None
        try:
            self.study = optuna.create_study(
                storage=self.keys["storage"]
                or f"sqlite:///{self.multirun.folder.absolute()}/study.db",
                study_name=self.multirun.folder.name,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=self.keys["prune_after"]),
                load_if_exists=True,
            )
            former = self.study.trials
        except Exception as error:
            # raised by Optuna, SQLAlchemy or the database's driver, which may be missing
            raise ConfigError(
                f"{self._where()}: cannot be used as a study ({_first_line(error)}); repair it, or"
                " give another"
            ) from None
        for trial in former:
            self.space.check_same(trial.distributions, self._where())

    def _run(self, settings: DictConfig, device: str) -> None:
        from optuna.trial import Trial, TrialState

        multirun = self.multirun
        self.unfinished: list[Job] = []
        for frozen in self.study.trials:
            job = self._job(frozen.params, frozen.number + 1)
            if frozen.state == TrialState.RUNNING:
                self.trials[job.number] = Trial(self.study, frozen._trial_id)
                self.unfinished.append(job)
            elif frozen.state == TrialState.PRUNED:
                multirun.known[job.number] = PRUNED
            elif frozen.state == TrialState.FAIL:
                job.error = job.error or "the study has it as failed for good"
                multirun.refuse(job)
        multirun.write()
        former = len(multirun.failures)

        def next_job(busy: Collection[Path | None]) -> Job | None:
            while len(multirun.failures) == former or settings.on_error != "stop":
                if not self.unfinished and not self._ask(settings.jobs > 1):
                    break
                if self.unfinished[0].directory in busy:
                    break  # a repetition waits for the result of the trial it repeats
                job = self.unfinished.pop(0)
                if job.error:
                    multirun.refuse(job)
                    self.study.tell(self.trials[job.number], state=TrialState.FAIL)
                elif not self._is_repetition(job):
                    print(f"trial {job.number} of {self.keys['trials']}: {job.about}", flush=True)
                    return job
            return None

        multirun.children(settings, settings.jobs, device).run(
            next_job, self._tell, self._should_prune
        )
        if self.exhausted:
            print(
                f"there are no other values: all {self.space.size:.0f} combinations have had a"
                " trial",
                flush=True,
            )

    def _ask(self, several: bool) -> bool:
        """Asks for a new trial, which depends on the seed, its number and earlier trials, not on
        interruptions.
        """
        number = len(self.multirun.jobs) + 1
        if number > self.keys["trials"]:
            return False
        if len({job.about for job in self.multirun.jobs}) >= self.space.size:
            self.exhausted = True
            return False
        seed = np.random.SeedSequence([self.keys["seed"], number]).generate_state(1).item()
        self.study.sampler = self._sampler(seed, several)
        trial = self.study.ask(dict(self.space.distributions))
        self.trials[number] = trial
        self.unfinished.append(self._job(trial.params, number))
        return True

    def _is_repetition(self, job: Job) -> bool:
        """Reports an earlier trial's result for a trial with the same values."""
        from optuna.trial import TrialState

        trial = self.trials[job.number]
        for former in self.study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)
        ):
            if former.params == trial.params:
                break
        else:
            return False
        for step, value in former.intermediate_values.items():
            trial.report(value, step)
        self.study.tell(
            trial, former.value if former.state == TrialState.COMPLETE else None, state=former.state
        )
        if former.state == TrialState.PRUNED:
            self.multirun.known[job.number] = PRUNED
        print(
            f"trial {job.number} of {self.keys['trials']}: repeats trial {former.number + 1}, and"
            " takes its value",
            flush=True,
        )
        self.multirun.write()
        return True

    def _sampler(self, seed: int, several: bool) -> BaseSampler:
        from optuna.samplers import RandomSampler, TPESampler

        if self.keys["sampler"] == "random":
            return RandomSampler(seed)
        return TPESampler(
            seed=seed, n_startup_trials=self.keys["random_trials"], constant_liar=several
        )

    def _job(self, values: dict[str, Any], number: int) -> Job:
        job = self.multirun.plan(self.context, self.master, self.space.overrides(values), number)
        job.about = " ".join(job.overrides[len(self.space.shared) :])
        self.multirun.jobs.append(job)
        return job

    def _should_prune(self, job: Job) -> bool:
        """Returns whether a run's evaluations so far suggest pruning it."""
        result, trial = result_in(job.directory), self.trials[job.number]
        # nothing is new, so the database is not asked
        if self.evaluations_seen.get(job.number) == len(result.values):
            return False
        self.evaluations_seen[job.number] = len(result.values)
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        new = [(step, value) for step, value in result.values if step not in known]
        for step, value in new:
            trial.report(_cost(value, result.lower_is_better), step)
        if not (new and self.keys["prune"] and trial.should_prune()):
            return False
        self.pruned.add(job.number)
        return True

    def _tell(self, job: Job, status: int) -> None:
        """Reports a trial's result; an interrupted or failed one stays open for the next start."""
        from optuna.trial import TrialState

        result, trial = result_in(job.directory), self.trials[job.number]
        if status == signals.STATUS[signal.SIGTERM] and job.number in self.pruned:
            self.multirun.known[job.number], status = PRUNED, 0
            self.study.tell(trial, state=TrialState.PRUNED)
        elif status == 0 and result.last is not None:
            self.study.tell(trial, _cost(result.last, result.lower_is_better))
        elif not status:
            signals.say(
                f"error: {job.name}: its run has no {result.metric or 'metric'}, by which trials"
                " are judged"
            )
            status = 1
        self.multirun.record_end(job, status)


def _cost(value: float, lower_is_better: bool) -> float:
    """Returns the value as the study stores it: lower is better."""
    return value if lower_is_better else -value


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "hydra/sweeper=optuna: Optuna is not installed; .venv/bin/python -m pip install"
            " 'optuna>=4.9,<5'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _errors(optuna: Any) -> tuple[type[Exception], ...]:
    """Returns the errors that a storage may raise at any time."""
    from sqlalchemy.exc import SQLAlchemyError

    return optuna.exceptions.OptunaError, SQLAlchemyError


def _first_line(error: Exception) -> str:
    """Returns the first line of the database's own error, without Optuna's and SQLAlchemy's."""
    return brief(str(error.__cause__ or error).partition("\n")[0]) or type(error).__name__
