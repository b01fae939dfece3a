"""The confusion table of a classifier, and the example that is shown."""

import json

import numpy as np
import pytest
import torch

from contract import IGNORE, Prediction
from data.digits.evaluators import SHOWN, Confusion, Mistakes
from tests.data.helpers import reported
from tests.data.recursive.helpers import source, write_dataset

LABELS, ANSWERS = [0, 0, 0, 2, 2, 2, 2], [0, 1, 0, 2, 2, 0, 2]


def batch_of(rows: list[int], first: int) -> tuple:
    """These examples in a batch of four, padded with rows that a net has an answer to as well."""
    labels, answers = torch.full((4,), IGNORE, dtype=torch.int32), torch.full((4,), 3)
    labels[: len(rows)] = torch.tensor(LABELS)[rows]
    answers[: len(rows)] = torch.tensor(ANSWERS)[rows]
    return np.arange(len(rows)) + first, {"labels": labels}, {"answer": answers}


def test_recalls_and_table() -> None:
    batches = batch_of([0, 6, 3], 0), batch_of([1, 5, 4], 4), batch_of([2], 8)
    report = reported(Confusion(4), *batches)
    assert report.metrics == {"recall_0": pytest.approx(2 / 3), "recall_2": 3 / 4}, (
        "of a class without examples there is none"
    )
    assert set(report.metrics) <= set(Confusion(4).scalars)
    counts = [[2, 1, 0, 0], [0, 0, 0, 0], [1, 0, 3, 0], [0, 0, 0, 0]]
    (panel,) = json.loads(report.files["confusion.scene.json"])["panels"]
    assert (panel["values"], panel["rows"]) == (counts, ["0", "1", "2", "3"])


def test_one_example_is_shown_of_all_sets(tmp_path) -> None:
    for name in "ab":
        for split in ("train", "test"):
            write_dataset(tmp_path / name, [[1]] * 20, split)
    puzzles = source(data_paths=[str(tmp_path / name) for name in "ab"])
    assert [len(puzzles.evaluators(name)) for name in puzzles.eval_sets()] == [1, 0]
    (example,) = puzzles.evaluators("a/all")
    inputs = {"inputs": torch.ones(2, 4), "labels": torch.ones(2, 4)}
    example.add(np.array([8, 9]), inputs, Prediction({}, {"answer": torch.ones(2, 4)}))
    assert example.rows() == {}, "not the first example"


def test_the_first_mistakes_are_shown() -> None:
    """Every third of these images is taken for the next digit; one has no label."""
    count = 3 * SHOWN + 9
    labels = torch.arange(count) % 10
    answers = torch.where(torch.arange(count) % 3 == 0, (labels + 1) % 10, labels)
    labels[3] = IGNORE
    batch = {
        "inputs": torch.arange(count)[:, None, None].expand(-1, 28, 28).to(torch.uint8),
        "labels": labels,
    }
    logits = torch.nn.functional.one_hot(answers, 10).float()
    batches = []
    for rows in torch.arange(count).split(5):
        some = {name: values[rows] for name, values in batch.items()}
        batches.append((rows.numpy(), some, {"answer": answers[rows], "logits": logits[rows]}))
    report = reported(Mistakes(), *batches)
    shown = json.loads(report.files["mistakes.scene.json"])
    assert [item["index"] for item in shown["items"]] == [0, *range(6, 3 * SHOWN + 6, 3)][:SHOWN]
    assert shown["items"][1] == {
        "pixels": "B" * 784,
        "answer": 7,
        "truth": 6,
        "share": pytest.approx(np.e / (np.e + 9), rel=1e-4),
        "index": 6,
    }
    assert reported(Mistakes()).files == {}
