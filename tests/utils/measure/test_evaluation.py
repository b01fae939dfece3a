"""Results of several sets, what evaluators add, and a disk that takes no outputs.
tests/test_exact.py shows that they are the same at any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from contract import Batch, Examples, Prediction, Report
from tests.utils.rundir.test_status import fill
from trial.predictions import try_predictions
from utils.errors import ConfigError
from utils.measure.evaluation import Evaluation
from utils.ranks.distributed import Dist
from utils.rundir import directory, terminal

ONE = torch.ones(())


def folder(path: Path, say: Callable = print, write: Callable = pytest.fail) -> Any:
    """Stands for a run directory."""
    return SimpleNamespace(
        directory=path, say=say, write_evaluation=write, progress=lambda *given: None
    )


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


class Counts(Says):
    """Measures, and writes a file."""

    scalars = ("total",)

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        return Report({"total": 7.0}, {"rows.bin": b"7"})


def test_sets_keep_their_names_and_evaluators_belong_to_one() -> None:
    written: list[tuple] = []
    place = folder(Path(), write=lambda *given: written.append(given))
    evaluation = Evaluation(Dist(), 5, place)
    for name, number in (("a", 4), ("none", 0), ("b", 2)):
        evaluation.run(name, number, examples(number), answered, [Counts()] if name != "b" else [])
    accuracies = ["eval/accuracy", "eval/a/accuracy", "eval/b/accuracy"]
    assert evaluation.finish() == dict.fromkeys(accuracies, 1.0) | {"eval/a/total": 7.0}
    assert written == [(5, "a", {"rows.bin": b"7"})]


def test_evaluators_add_to_the_line_of_each_evaluation() -> None:
    evaluation = Evaluation(Dist(), 5, folder(Path()))
    evaluation.run("a", 4, examples(4), answered, [Adds("votes 0.5"), Says(), Adds("paths 0.7")])
    evaluation.run("b", 2, examples(2), answered)
    evaluation.finish()
    assert evaluation.summary == "accuracy 1.0000  votes 0.5  paths 0.7"
    evaluation.run("b", 2, examples(2), answered, [Adds("votes 0.6")])
    evaluation.finish()
    assert evaluation.summary == "accuracy 1.0000  a: votes 0.5  paths 0.7  b: votes 0.6"


def test_a_long_evaluation_says_every_ten_seconds_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    def slowly(batch: Batch) -> Prediction:
        run.progress("thinking: step", 0, 4)
        seconds[0] += 6.0
        run.progress("thinking: step", 2, 4)
        seconds[0] += 6.0
        run.progress("thinking: step", 3, 4)
        return answered(batch)

    run = directory.RunDirectory(tmp_path, Dist())
    for step in (5, 6):  # each evaluation is timed by itself
        evaluation = Evaluation(Dist(), step, run)
        evaluation.run("short", 2, examples(2), answered)
        evaluation.run("long", 8, examples(8), slowly)
        seconds[0] += 100
    each = [
        " 75%  thinking: step 3/4  0:00:04 left",
        " 25%  evaluating long: example 2/8  0:00:36 left",
        " 75%  thinking: step 3/4  0:00:04 left",
        " 50%  evaluating long: example 4/8  0:00:24 left",
        " 75%  thinking: step 3/4  0:00:04 left",
        " 75%  evaluating long: example 6/8  0:00:12 left",
        " 75%  thinking: step 3/4  0:00:04 left",
    ]
    assert capsys.readouterr().out.splitlines() == each * 2


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
    evaluation.run("a", 4, examples(4), answered, [Breaks(), Says()])
    assert evaluation.finish() == {"eval/accuracy": 1.0}
    assert evaluation.text == "once upon a time"
    with pytest.raises(IndexError):
        evaluation.run("a", 4, examples(4), answered, [Breaks("metric")])


def test_a_full_disk_costs_the_outputs_and_not_the_run(small_disk: Path) -> None:
    fill(small_disk)
    said: list[str] = []
    evaluation = Evaluation(Dist(), 5, folder(small_disk, said.append), ["inputs", "answer"])
    evaluation.run("all", 3, examples(3), answered)
    assert evaluation.finish() == {"eval/accuracy": 1.0}
    assert said == [
        "step_5_all_preds.0.safetensors cannot be written (No space left on device); the run"
        " goes on"
    ]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_an_output_without_a_row_for_each_example_is_one_line(tmp_path: Path) -> None:
    def mean(batch: Batch) -> Prediction:
        return Prediction({"accuracy": (ONE, ONE)}, {"answer": batch["inputs"].mean(0)})

    line = r"^predict: its output answer has the shape \[1\] for a batch of 2; return one row for"
    with pytest.raises(ConfigError, match=line):
        Evaluation(Dist(), 5, folder(tmp_path)).run("a", 4, examples(4), mean)


def test_a_set_that_lacks_what_predict_reads_is_one_line() -> None:
    source = SimpleNamespace(eval_sets=lambda: {"val": Examples({"inputs": np.zeros((3, 2))})})
    objective: Any = MagicMock(predict=lambda batch: batch["labels"])
    line = "^the evaluation set val has no labels, only inputs; `predict` reads labels, so add it"
    with pytest.raises(ConfigError, match=line):
        try_predictions("eval/loss", [], source, objective, torch.device("cpu"), True)


def test_a_wrong_headline_is_named_beside_those_that_are_accepted() -> None:
    objective: Any = MagicMock(headline="acuracy", costs=())
    objective.predict = lambda batch: Prediction({"accuracy": (0, 0), "mse": (0, 0)})
    objective.evaluators = lambda row: []
    sets = {"val": Examples({"labels": np.zeros(3)})}
    source = SimpleNamespace(eval_sets=lambda: sets, evaluators=lambda name: [])
    line = r"\.headline=acuracy: not known here; choose from accuracy, mse$"
    with pytest.raises(ConfigError, match=line):
        try_predictions(None, [], source, objective, torch.device("cpu"), False)
    objective.headline = "mse"
    try_predictions(None, [], source, objective, torch.device("cpu"), False)


def test_nothing_is_compiled_for_the_trial() -> None:
    @torch.compile(backend=lambda graph, inputs: pytest.fail("compiled"))
    def accuracy(answers: Tensor) -> tuple[Tensor, Tensor]:
        return answers.sum() * 0, ONE * 0

    objective: Any = MagicMock(headline="accuracy", costs=())
    objective.predict = lambda batch: Prediction({"accuracy": accuracy(batch["labels"])})
    objective.evaluators = lambda row: []
    sets = {"val": Examples({"labels": np.ones(3)})}
    source = SimpleNamespace(eval_sets=lambda: sets, evaluators=lambda name: [])
    try_predictions(None, [], source, objective, torch.device("cpu"), False)
