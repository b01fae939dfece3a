"""The same results at any number of ranks, from evaluators of any kind; and a disk that takes no
outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks import check_ended_well, run_module
from tests.utils.measure.ranks_evaluation import EXAMPLES, evaluated, folder
from tests.utils.rundir.test_status import fill
from utils.measure.evaluation import Evaluation
from utils.measure.evaluator import Batch, Prediction, Report
from utils.ranks.distributed import Dist

ONE = torch.ones(())


@pytest.fixture(scope="module")
def alone() -> dict:
    return evaluated(Dist())


@pytest.mark.parametrize("ranks", [2, pytest.param(9, marks=pytest.mark.slow)])  # two have padding
def test_every_rank_knows_what_one_rank_finds_to_the_last_bit(
    alone: dict, ranks: int, tmp_path: Path
) -> None:
    check_ended_well(run_module(ranks, "tests.utils.measure.ranks_evaluation", str(tmp_path)))
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks))
    assert first == alone
    assert all(other["results"] == alone["results"] for other in others)
    assert not any(other["drawn"] or other["text"] for other in others), "rank 0 alone writes"


def test_sets_keep_their_names_and_evaluators_belong_to_one(alone: dict) -> None:
    results = alone["results"]
    assert [*results] == [
        "eval/cube",
        "eval/sine",
        "eval/a/cube",
        "eval/a/sine",
        "eval/a/total",
        "eval/a/last",
        "eval/b/cube",
        "eval/b/sine",
    ]
    mean = (np.sin(np.arange(EXAMPLES)).sum() + np.sin(np.arange(4)).sum()) / (EXAMPLES + 4)
    assert float.fromhex(results["eval/sine"]) == pytest.approx(mean, abs=1e-12)
    assert results["eval/a/last"] == "nan"
    rows = sum(index % 4 for index in range(EXAMPLES))
    assert alone["drawn"] == [repr((5, "a", {"rows.bin": bytes([rows])}))]
    assert alone["text"] == f"{rows} rows"
    assert alone["summary"].split()[::2] == ["cube", "sine"]


# --- one process


def examples(number: int) -> Iterator[tuple[np.ndarray, Batch]]:
    """So many in batches of two, the last row padded."""
    for first in range(0, number, 2):
        yield (
            np.arange(first, min(first + 2, number)),
            {"inputs": torch.tensor([[5.0 * first], [5.0 * first + 1]])},
        )


def answered(batch: Batch) -> Prediction:
    return Prediction({"accuracy": (ONE, ONE)}, {"answer": batch["inputs"] + 1})


class Says:
    """Has something to show, and nothing to measure."""

    scalars = ()

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        pass

    def rows(self) -> dict[str, Tensor]:
        return {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        return Report(text="once upon a time")


class Adds(Says):
    """Adds to the log's line."""

    def __init__(self, line: str) -> None:
        self._line = line

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        return Report(line=self._line)


def test_evaluators_add_to_the_line_of_each_evaluation() -> None:
    evaluation = Evaluation(Dist(), 5, folder(Path()))
    evaluation.run("a", examples(4), answered, [Adds("votes 0.5"), Says(), Adds("paths 0.7")])
    evaluation.run("b", examples(2), answered)
    evaluation.finish()
    assert evaluation.summary == "accuracy 1.0000  votes 0.5  paths 0.7"
    evaluation.run("b", examples(2), answered, [Adds("votes 0.6")])
    evaluation.finish()
    assert evaluation.summary == "accuracy 1.0000  a: votes 0.5  paths 0.7  b: votes 0.6"


class Breaks(Says):
    """Cannot show what it has."""

    def __init__(self, *scalars: str) -> None:
        self.scalars = scalars  # type: ignore[assignment]

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        raise IndexError("no token is left")


def test_what_is_only_for_show_never_ends_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = Evaluation(Dist(), 5, folder(tmp_path))
    evaluation.run("a", examples(4), answered, [Breaks(), Says()])
    assert evaluation.finish() == {"eval/accuracy": 1.0}
    assert evaluation.text == "once upon a time"
    with pytest.raises(IndexError):
        evaluation.run("a", examples(4), answered, [Breaks("metric")])


def test_a_full_disk_costs_the_outputs_and_not_the_run(small_disk: Path) -> None:
    fill(small_disk)
    said: list[str] = []
    evaluation = Evaluation(Dist(), 5, folder(small_disk, said.append), ["inputs", "answer"])
    evaluation.run("all", examples(3), answered)
    assert evaluation.finish() == {"eval/accuracy": 1.0}
    assert said == [
        "step_5_all_preds.0.safetensors cannot be written (No space left on device); the run"
        " goes on"
    ]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
