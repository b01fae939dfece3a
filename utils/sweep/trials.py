"""`hydra/sweeper=optuna`: trials are jobs whose values Optuna proposes. All is in the study's file: a sweep that was stopped goes on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from utils.command.config import check_keys
from utils.command.keys import CONF, read
from utils.errors import ConfigError
from utils.ranks import signals
from utils.rundir.lock import Lock
from utils.sweep.jobs import Job, settings_of
from utils.sweep.launcher import Sweep
from utils.sweep.results import result_in
from utils.sweep.space import Space, space_of
from utils.sweep.summary import FAILED

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler

PRUNED = "pruned"
KEYS = "hydra.sweeper"


class Trials(Sweeper):
    """Asks for values, runs jobs, tells what came of them."""

    whole: Sweep  # set where this is registered
    context: HydraContext
    space: Space
    study: Study

    def __init__(self, **given: Any) -> None:
        defaults, rules = read(CONF / "hydra" / "sweeper" / "optuna.yaml", KEYS)
        self.keys = check_keys({KEYS: given}, {KEYS: {key: defaults[KEYS][key] for key in given}}, rules)[KEYS]
        self.trials: dict[int, Trial] = {}  # by the number of their jobs
        self.heard: dict[int, int] = {}  # how many evaluations of each
        self.pruned: set[int] = set()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.master = hydra_context, config

    def sweep(self, arguments: list[str]) -> None:
        """Finish what an earlier start has left unfinished, then try more."""
        whole = self.whole
        if not whole.alone:
            raise ConfigError(f"hydra/sweeper=optuna: starts trials itself; start one process instead of {whole.launch.world_size} ranks")
        if self.master.hydra.launcher._target_ != "hydra_plugins.lockstep.Local":
            raise ConfigError("hydra/sweeper=optuna: starts trials itself; remove hydra/launcher")
        optuna = _optuna()
        self.space = space_of(arguments, self.context.config_loader)
        corners = [whole.plan(self.context, self.master, self.space.corner(end), 1) for end in (0, -1)]
        if corners[0].error and corners[0].error == corners[1].error:
            raise ConfigError(corners[0].error)  # whatever values there are
        settings = settings_of(corners, any_right=False)
        if settings.only is not None:
            raise ConfigError(f"sweep.only={settings.only}: Optuna decides on trials as it goes; leave it out")
        whole.folder = Path(self.master.hydra.sweep.dir)
        whole.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(whole.folder / "study")
        if other := lock.acquire():
            raise ConfigError(f"{whole.folder}: the same sweep is going on ({other}); it needs no second process")
        try:
            self.study = optuna.create_study(
                storage=self.keys["storage"] or f"sqlite:///{whole.folder.absolute()}/study.db", study_name=whole.folder.name,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=self.keys["prune_after"]), load_if_exists=True,
            )  # fmt: skip
            self._run(settings, corners[0].raw.device)
        finally:
            lock.release()

    def _run(self, settings: DictConfig, device: str) -> None:
        from optuna.trial import Trial, TrialState

        whole = self.whole
        unfinished = []
        for frozen in self.study.trials:
            job = self._job(frozen.params, frozen.number + 1)
            if frozen.state == TrialState.RUNNING:
                self.trials[job.number] = Trial(self.study, frozen._trial_id)
                unfinished.append(job)
            elif frozen.state in (TrialState.PRUNED, TrialState.FAIL):
                whole.known[job.number] = PRUNED if frozen.state == TrialState.PRUNED else FAILED
        whole.write()

        def following() -> Job | None:
            while not (whole.failures and settings.on_error == "stop"):
                if unfinished:
                    job = unfinished.pop(0)
                elif len(whole.jobs) < self.keys["trials"]:
                    job = self._ask(settings.jobs > 1)
                else:
                    break
                if not job.error:
                    print(f"trial {job.number} of {self.keys['trials']}: {' '.join(job.overrides[len(self.space.shared) :])}", flush=True)
                    return job
                whole.refuse(job)
                self.study.tell(self.trials[job.number], state=TrialState.FAIL)
            return None

        whole.children(settings, settings.jobs, device).run(following, self._tell, self._is_bad)

    def _ask(self, several: bool) -> Job:
        """A new trial. What it is follows from the seed, its number and the trials before, however often the sweep was stopped."""
        number = len(self.whole.jobs) + 1
        seed = np.random.SeedSequence([self.keys["seed"], number]).generate_state(1).item()
        self.study.sampler = self._sampler(seed, several)
        trial = self.study.ask(dict(self.space.distributions))
        self.trials[number] = trial
        return self._job(trial.params, number)

    def _sampler(self, seed: int, several: bool) -> BaseSampler:
        from optuna.samplers import RandomSampler, TPESampler

        if self.keys["sampler"] == "random":
            return RandomSampler(seed)
        return TPESampler(seed=seed, n_startup_trials=self.keys["random_trials"], constant_liar=several)

    def _job(self, values: dict[str, Any], number: int) -> Job:
        job = self.whole.plan(self.context, self.master, self.space.overrides(values), number)
        self.whole.jobs.append(job)
        return job

    def _is_bad(self, job: Job) -> bool:
        """Whether a run's evaluations so far say that it need not go on."""
        result, trial = result_in(job.directory), self.trials[job.number]
        if self.heard.get(job.number) == len(result.values):  # nothing new, which the database need not be asked for
            return False
        self.heard[job.number] = len(result.values)
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        new = [(step, value) for step, value in result.values if step not in known]
        for step, value in new:
            trial.report(_cost(value, result.lower), step)
        if not (new and self.keys["prune"] and trial.should_prune()):
            return False
        self.pruned.add(job.number)
        return True

    def _tell(self, job: Job, status: int) -> None:
        """What has come of a trial; one that was interrupted stays open."""
        from optuna.trial import TrialState

        result, trial = result_in(job.directory), self.trials[job.number]
        if status and job.number in self.pruned:
            self.whole.known[job.number], status = PRUNED, 0
            self.study.tell(trial, state=TrialState.PRUNED)
        elif status == 0 and result.last is not None:
            self.study.tell(trial, _cost(result.last, result.lower))
        elif status not in signals.STATUS.values():
            if not status:
                signals.say(f"error: {job.name}: its run has no {result.metric or 'metric'}, by which trials are judged")
            self.study.tell(trial, state=TrialState.FAIL)
            status = status or 1
        self.whole.ended(job, status)


def _cost(value: float, lower: bool) -> float:
    """As the study has it, which begins before a run says what it is judged by: less is better."""
    return value if lower else -value


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("hydra/sweeper=optuna: Optuna is not installed; .venv/bin/python -m pip install 'optuna>=4.9,<5'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
