"""Which checkpoint counts as the best; tests/test_resume.py has more, in real runs."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from models.objective import judging_metric
from tests.utils.checkpoint.helpers import as_it_is
from utils.checkpoint import writer
from utils.checkpoint.policy import Checkpointer, improves
from utils.checkpoint.registry import Group
from utils.checkpoint.resume import Start
from utils.errors import RunError
from utils.ranks.distributed import Dist


def test_a_best_that_could_not_be_saved_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = as_it_is(model=Group(lambda: {"weight": torch.zeros(1)}, print))
    run = MagicMock(directory=tmp_path, dist=Dist())
    config = MagicMock(keep=None, checkpoint_interval=None, objective_metric=None)
    full_disk = MagicMock(side_effect=OSError)
    with Checkpointer(config, run, saved, "accuracy", Start()) as checkpointer:
        for step, accuracy, write in (
            (1, 0.5, writer.write),
            (2, 0.9, full_disk),
            (3, 0.7, writer.write),
        ):
            monkeypatch.setattr(writer, "write", write)
            progress = {"step": step, "results": {"accuracy": accuracy}}
            checkpointer.save_if(progress, wanted=False, stopping=False, evaluated=True)
            checkpointer._writer.wait()
    assert full_disk.called
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_3\n"


@pytest.mark.parametrize("failing", [3, 4])
def test_the_last_step_is_saved_again_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    saved = as_it_is(model=Group(lambda: {"weight": torch.zeros(1)}, print))
    run = MagicMock(directory=tmp_path, dist=Dist())
    config = MagicMock(keep=None, checkpoint_interval=None, objective_metric=None)
    write, tries = writer.write, iter(range(9))

    def sometimes(*arguments: object, **keys: object) -> object:
        if next(tries) < failing:
            raise OSError("full")
        return write(*arguments, **keys)

    monkeypatch.setattr(writer, "write", sometimes)
    progress = {"step": 1, "results": {}}
    with Checkpointer(config, run, saved, "accuracy", Start()) as checkpointer:
        checkpointer.save_if(progress, wanted=True, stopping=False, evaluated=False)
        if failing == 4:  # the first one, and three more
            with pytest.raises(RunError, match="step 1 could not be saved"):
                checkpointer.wait_until_saved(progress)
        else:
            checkpointer.wait_until_saved(progress)
            assert (tmp_path / "checkpoints" / "latest").read_text() == "step_1\n"


@pytest.mark.parametrize(
    ("metric", "value", "best", "better"),
    [
        ("eval/accuracy", 0.5, None, True),
        ("eval/accuracy", 0.6, 0.5, True),
        ("-eval/kl", 0.6, 0.5, False),
        ("-eval/kl", 0.4, 0.5, True),
        ("-eval/kl", float("nan"), None, False),
    ],
)
def test_which_way_is_better_is_said_and_not_guessed(
    metric: str, value: float, best: float | None, better: bool
) -> None:
    assert judging_metric(MagicMock(costs=()), metric) == metric
    assert improves(metric, {metric.removeprefix("-"): value}, best) is better
    assert not improves(metric, {"eval/other": value}, best)
