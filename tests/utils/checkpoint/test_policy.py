"""When checkpoints are saved, and which one counts as the best."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.utils.checkpoint.helpers import as_it_is
from utils.checkpoint.policy import Checkpointer
from utils.checkpoint.reader import read_meta
from utils.checkpoint.registry import Origin, Registry, RunState
from utils.measure.metrics import Metric
from utils.ranks.distributed import Dist

LOSS, ACCURACY = Metric("eval/lm_loss", lower_is_better=True), Metric("eval/accuracy")
SETTINGS = {
    "keep": None,
    "exact": False,
    "checkpoint_minutes": None,
    "checkpoint_interval": None,
    "objective_metric": None,
}


class SavedRun:
    """A run with a step and results, whose checkpoints go to a real folder."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.folder = directory, directory / "checkpoints"
        origin = Origin({}, "x", None, 0.1, {})
        self.saved = Registry(lambda: origin, as_it_is())
        self.saved.add("model", lambda: {"weight": torch.zeros(1)}, print)
        self.judge(ACCURACY)

    def judge(self, metric: Metric) -> None:
        """As a run that was started again with another `objective_metric`."""
        run: Any = SimpleNamespace(
            directory=self.directory,
            dist=Dist(),
            say=lambda text: None,
            event=lambda *_, **__: None,
            check_place=lambda: None,
        )
        self.metric = metric
        self.checkpointer = Checkpointer(OmegaConf.create(SETTINGS), run, self.saved, metric, -1)

    @property
    def state(self) -> RunState:
        return self.saved.run_state

    def evaluated(self, step: int, value: float, fails: bool = False) -> None:
        """After a step that was evaluated; while the save `fails`, its folder is gone."""
        self.state.step, self.state.results = step, {self.metric.name: value}
        away = self.folder.rename(self.folder.with_name("away")) if fails else self.folder
        self.checkpointer.save_if(wanted=False, stopping=False, evaluated=True)
        for thread in threading.enumerate():
            if thread.name.startswith("save-step"):
                thread.join()
        away.rename(self.folder)

    def pointers(self) -> tuple[str, str]:
        best, latest = ((self.folder / name).read_text().strip() for name in ("best", "latest"))
        return best, latest


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    return SavedRun(tmp_path / "run")


def test_a_best_that_could_not_be_saved_does_not_count(run: SavedRun) -> None:
    run.evaluated(1, 0.5)
    run.evaluated(2, 0.9, fails=True)
    run.evaluated(3, 0.7)
    assert run.pointers() == ("step_3", "step_3")
    run.evaluated(4, 0.8, fails=True)
    run.state.step = 5
    run.checkpointer.save_if(wanted=True, stopping=False, evaluated=False)
    run.checkpointer.wait_until_saved()
    assert run.pointers() == ("step_3", "step_5")
    assert read_meta(run.folder)["best"] == 0.7


def test_another_metric_is_not_compared_with_the_old_ones_value(run: SavedRun) -> None:
    run.evaluated(1, 0.9)
    run.judge(LOSS)
    for step, value in ((2, 3.0), (3, 2.0), (4, 2.5)):
        run.evaluated(step, value)
    assert run.pointers() == ("step_3", "step_3")
