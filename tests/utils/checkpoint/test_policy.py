"""When checkpoints are saved, and which one counts as the best."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from utils.checkpoint import policy
from utils.checkpoint.policy import Checkpointer
from utils.checkpoint.registry import RunState
from utils.errors import RunError
from utils.measure.metrics import Metric

LOSS, ACCURACY = Metric("eval/lm_loss", lower_is_better=True), Metric("eval/accuracy")


class FakeWriter:
    """Notes what it is asked to save, and fails as often as it is asked to."""

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


class KeptRun:
    """The parts of a run that a checkpointer needs, and the checkpointer."""

    def __init__(self) -> None:
        dist = SimpleNamespace(is_main=True, all_gather_text=lambda text: [text])
        cfg = SimpleNamespace(
            keep=2, checkpoint_minutes=None, checkpoint_interval=None, objective_metric=None
        )
        self.run: Any = SimpleNamespace(
            directory=Path("runs/x"), say=print, lost=lambda: "", dist=dist
        )
        self.saved: Any = SimpleNamespace(run_state=RunState(), snapshot=lambda: ())
        self.metric = ACCURACY
        self.checkpointer: Any = Checkpointer(cast(Any, cfg), self.run, self.saved, self.metric, -1)

    def judge(self, metric: Metric) -> None:
        """As a run that was started again with another `objective_metric`."""
        self.metric = self.checkpointer._metric = metric

    @property
    def run_state(self) -> RunState:
        return self.saved.run_state


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptRun:
    monkeypatch.setattr(policy, "Writer", FakeWriter)
    return KeptRun()


def evaluated(kept: KeptRun, step: int, value: float, wanted: bool = False) -> None:
    kept.run_state.step, kept.run_state.results = step, {kept.metric.name: value}
    kept.checkpointer.save_if(wanted, stopping=False, evaluated=True)


def saved(kept: KeptRun) -> list[tuple[int, bool]]:
    return kept.checkpointer._writer.saved


def test_the_best_is_saved_and_others_only_when_wanted(kept: KeptRun) -> None:
    for step, value in ((1, 0.5), (2, 0.4), (3, 0.6)):
        evaluated(kept, step, value)
    evaluated(kept, 4, 0.1, wanted=True)
    assert saved(kept) == [(1, True), (3, True), (4, False)]
    assert (kept.run_state.best, kept.run_state.best_of) == (0.6, "eval/accuracy")


def test_a_best_that_could_not_be_saved_does_not_count(kept: KeptRun) -> None:
    evaluated(kept, 1, 0.5)
    kept.checkpointer._writer.fail = 1
    evaluated(kept, 2, 0.9)
    evaluated(kept, 3, 0.7)
    assert saved(kept) == [(1, True), (2, True), (3, True)]
    assert kept.run_state.best == 0.7
    evaluated(kept, 4, 0.6, wanted=True)
    assert saved(kept)[-1] == (4, False)


def test_what_a_later_checkpoint_says_is_the_best_is_on_the_disk(kept: KeptRun) -> None:
    evaluated(kept, 1, 0.5)
    kept.checkpointer._writer.fail = 1
    evaluated(kept, 2, 0.9)
    kept.run_state.step = 3
    kept.checkpointer.save_if(wanted=True, stopping=False, evaluated=False)
    assert kept.run_state.best == 0.5


def test_the_last_one_is_tried_again_as_the_best(kept: KeptRun) -> None:
    kept.checkpointer._writer.fail = 2
    evaluated(kept, 5, 0.9)
    kept.checkpointer.wait_until_saved()
    assert saved(kept) == [(5, True)] * 3
    assert kept.run_state.best == 0.9
    kept.checkpointer._writer.fail = 9
    evaluated(kept, 6, 0.95)
    with pytest.raises(
        RunError,
        match=r"step 6 could not be saved \(rank 0: No space left on device\); make room there",
    ):
        kept.checkpointer.wait_until_saved()


def test_a_directory_that_is_gone_ends_the_run_without_another_try(kept: KeptRun) -> None:
    quiet = kept.checkpointer.notices()
    assert not quiet
    assert kept.checkpointer.decide(quiet) == (0, False)
    kept.checkpointer._writer.fail = 9
    evaluated(kept, 7, 0.9)
    kept.run.lost = lambda: "it is gone"
    with pytest.raises(RunError, match=r"^it is gone$"):
        kept.checkpointer.decide(kept.checkpointer.notices())
    with pytest.raises(RunError, match=r"^it is gone$"):
        kept.checkpointer.wait_until_saved()
    assert saved(kept) == [(7, True)]


def test_another_metric_is_not_compared_with_the_old_ones_value(kept: KeptRun) -> None:
    evaluated(kept, 1, 0.9)
    kept.judge(LOSS)
    evaluated(kept, 2, 3.0)
    evaluated(kept, 3, 2.0)
    evaluated(kept, 4, 2.5)
    assert saved(kept) == [(1, True), (2, True), (3, True)]


def test_another_direction_is_another_measure(kept: KeptRun) -> None:
    kept.judge(Metric("eval/kl", lower_is_better=True))
    evaluated(kept, 1, 3.0)
    kept.judge(Metric("eval/kl"))
    evaluated(kept, 2, 2.0)
    evaluated(kept, 3, 1.0)
    assert saved(kept) == [(1, True), (2, True)]
