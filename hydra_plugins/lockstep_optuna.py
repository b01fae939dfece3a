"""`hydra/sweeper=optuna`: Hydra's Optuna sweeper, continued where it was stopped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

if find_spec("hydra_plugins.hydra_optuna_sweeper"):
    import optuna
    from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper
    from optuna.trial import TrialState

    from utils.errors import ConfigError

    class Trials(OptunaSweeper):
        """Counts the trials that an earlier start has finished, and begins with those that it left
        open: each finds its own run.
        """

        def sweep(self, arguments: list[str]) -> None:
            sweeper = self.sweeper
            if sweeper._get_directions() != ["minimize"]:
                raise ConfigError(
                    f"hydra.sweeper.direction={sweeper.direction}: trials return the metric so that"
                    " less is better, accuracies as negative numbers; leave it out"
                )
            Path(sweeper.sweep_dir).mkdir(parents=True, exist_ok=True)  # for the study
            study = optuna.create_study(
                storage=sweeper.storage,
                study_name=sweeper.study_name,
                directions=sweeper._get_directions(),
                load_if_exists=True,
            )
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    study.tell(trial.number, state=TrialState.FAIL)
                    study.enqueue_trial(trial.params)
            finished = sum(trial.state == TrialState.COMPLETE for trial in trials)
            sweeper.n_trials = max(0, sweeper.n_trials - finished)
            if trials:
                sweeper.sampler.reseed_rng()  # else it would draw the first values again
            sweeper.sweep(arguments)
