"""What is saved when, and which checkpoint counts as the best."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from utils.checkpoint import policy
from utils.checkpoint.policy import Keeper
from utils.errors import RunError
from utils.measure.metrics import Metric

LOSS, ACCURACY = Metric("eval/lm_loss", lower=True), Metric("eval/accuracy")


class FakeSaver:
    """Notes what it is asked to save, and fails as often as it is told to."""

    def __init__(self, *_: object) -> None:
        self.saved: list[tuple[int, bool]] = []
        self.fail = 0
        self.failures, self.best_failed, self._outcome = 0, False, ""

    def save(self, step: int, best: bool) -> None:
        self.saved.append((step, best))
        self._outcome = "rank 0: No space left on device" if self.fail else ""
        self.fail, self.failures = max(0, self.fail - 1), self.failures + 1 if self.fail else 0
        if best:
            self.best_failed = bool(self._outcome)

    def wait(self) -> str:
        return self._outcome

    def take_stall_s(self) -> float:
        return 0.0

    def close(self, patience_s: float | None) -> None:
        pass


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(policy, "Saver", FakeSaver)
    monkeypatch.setattr(policy, "snapshot", lambda job: ())
    dist = SimpleNamespace(is_main=True, all_gather_text=lambda text: [text])
    cfg = SimpleNamespace(keep=2, checkpoint_minutes=None, checkpoint_interval=None, objective_metric=None)
    run = SimpleNamespace(directory=Path("runs/x"), say=print, lost=lambda: "")
    made = SimpleNamespace(dist=dist, cfg=cfg, run=run, step=0, best=None, best_of="", headline=ACCURACY, results={})
    made.objective = SimpleNamespace(judged_by=lambda asked: Metric.parse(asked) if asked != "eval/lm_loss" else LOSS)
    made.keeper = Keeper(made, -1)
    return made


def evaluated(job: Any, step: int, value: float, wanted: bool = False) -> None:
    job.step, job.results = step, {job.headline.name: value}
    job.keeper.save_if(wanted, stopping=False, evaluated=True)


def saved(job: Any) -> list[tuple[int, bool]]:
    return job.keeper._saver.saved


def test_the_best_is_saved_and_others_only_when_wanted(job: Any) -> None:
    for step, value in ((1, 0.5), (2, 0.4), (3, 0.6)):
        evaluated(job, step, value)
    evaluated(job, 4, 0.1, wanted=True)
    assert saved(job) == [(1, True), (3, True), (4, False)]
    assert (job.best, job.best_of) == (0.6, "eval/accuracy")


def test_a_best_that_could_not_be_saved_does_not_count(job: Any) -> None:
    evaluated(job, 1, 0.5)
    job.keeper._saver.fail = 1
    evaluated(job, 2, 0.9)
    evaluated(job, 3, 0.7)
    assert saved(job) == [(1, True), (2, True), (3, True)]
    assert job.best == 0.7
    evaluated(job, 4, 0.6, wanted=True)
    assert saved(job)[-1] == (4, False)


def test_what_a_later_checkpoint_says_is_the_best_is_on_the_disk(job: Any) -> None:
    evaluated(job, 1, 0.5)
    job.keeper._saver.fail = 1
    evaluated(job, 2, 0.9)
    job.step = 3
    job.keeper.save_if(wanted=True, stopping=False, evaluated=False)
    assert job.best == 0.5


def test_the_last_one_is_tried_again_as_the_best(job: Any) -> None:
    job.keeper._saver.fail = 2
    evaluated(job, 5, 0.9)
    job.keeper.settle()
    assert saved(job) == [(5, True)] * 3
    assert job.best == 0.9
    job.keeper._saver.fail = 9
    evaluated(job, 6, 0.95)
    with pytest.raises(RunError, match=r"step 6 could not be saved \(rank 0: No space left on device\); make room there"):
        job.keeper.settle()


def test_a_directory_that_is_gone_ends_the_run_without_another_try(job: Any) -> None:
    quiet = job.keeper.notices()
    assert not any(quiet)
    assert job.keeper.heed(quiet) == (0, False)
    job.keeper._saver.fail = 9
    evaluated(job, 7, 0.9)
    job.run.lost = lambda: "it is gone"
    with pytest.raises(RunError, match=r"^it is gone$"):
        job.keeper.heed(job.keeper.notices())
    with pytest.raises(RunError, match=r"^it is gone$"):
        job.keeper.settle()
    assert saved(job) == [(7, True)]


def test_another_metric_is_not_compared_with_the_old_ones_value(job: Any) -> None:
    evaluated(job, 1, 0.9)
    job.headline = LOSS
    evaluated(job, 2, 3.0)
    evaluated(job, 3, 2.0)
    evaluated(job, 4, 2.5)
    assert saved(job) == [(1, True), (2, True), (3, True)]


def test_another_direction_is_another_measure(job: Any) -> None:
    job.headline = Metric("eval/kl", lower=True)
    evaluated(job, 1, 3.0)
    job.headline = Metric("eval/kl")
    evaluated(job, 2, 2.0)
    evaluated(job, 3, 1.0)
    assert saved(job) == [(1, True), (2, True)]


def test_the_best_of_older_code_counts_on(job: Any) -> None:
    """It wrote the name alone, and knew which way a loss is better."""
    job.headline, job.best, job.best_of = LOSS, 1.0, "eval/lm_loss"
    evaluated(job, 1, 2.0)
    evaluated(job, 2, 0.5)
    assert saved(job) == [(2, True)]
