"""Votes over images of a puzzle: images are puzzles, come back as they were, and are counted as a
naive count has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from data.recursive.maze import leads
from data.recursive.sudoku import is_solved, sudoku_split
from data.recursive.votes import Votes, VoteSet, elect, symmetries
from data.source import IGNORE, Arrays
from tests.data.recursive.test_maze import SMALL
from tests.making import make_source
from utils.measure.evaluator import Prediction

SOLVED = np.array([[1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]], np.uint8)


class Examples:
    """Rows at hand."""

    def __init__(self, inputs: np.ndarray, labels: np.ndarray) -> None:
        self._inputs, self._labels = inputs.astype(np.int32), labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._inputs)

    def read(self, indices: np.ndarray) -> Arrays:
        ids = np.zeros(len(indices), np.int32)
        return {
            "inputs": self._inputs[indices],
            "labels": self._labels[indices],
            "puzzle_identifiers": ids,
        }

    def padding(self, rows: int) -> Arrays:
        return self.read(np.zeros(rows, np.int64))


def boards(count: int) -> Examples:
    made = sudoku_split(
        "x", 4, np.where(np.arange(16) % 3 == 0, SOLVED, 0), SOLVED, count - 1, 1
    ).sets["all"]
    return Examples(made.inputs, made.labels)


def mazes() -> Examples:
    return Examples(*(np.stack(part) for part in zip(*SMALL[:12], strict=True)))


@pytest.mark.parametrize(
    ("kind", "examples", "images"), [("sudoku", boards(9), 6), ("maze", mazes(), 8)]
)
def test_images_are_puzzles_and_come_back(kind: str, examples: Examples, images: int) -> None:
    every = np.arange(len(examples) * images)
    read = examples.read(every // images)
    made = symmetries(kind, read["inputs"].shape[1], 6, images, 0)
    asked = VoteSet(examples, made)
    assert len(asked) == len(every)
    inputs, answers = asked.read(every)["inputs"], made.image(read["labels"], every % images)
    assert (asked.read(every)["labels"] == IGNORE).all()
    assert np.array_equal(inputs[::images], read["inputs"][::images]), (
        "the first is the puzzle itself"
    )
    assert len({row.tobytes() for row in inputs[:images]}) == images
    assert (leads(inputs, answers) if kind == "maze" else is_solved(answers - 1, 4)).all()
    assert ((inputs == answers) | (inputs == (2 if kind == "maze" else 1))).all(), "clues are kept"
    assert np.array_equal(made.original(inputs, every % images), read["inputs"])
    assert np.array_equal(made.original(answers, every % images), read["labels"])


def made_up(examples: Examples, images: int) -> tuple[VoteSet, np.ndarray, np.ndarray]:
    """Answers of which most are wrong in a cell or two, often the same way; as the images are
    asked, and how sure.
    """
    rng = np.random.default_rng(7)
    asked = VoteSet(examples, symmetries("sudoku", 16, 6, images, 3))
    every = np.arange(len(asked))
    answers = examples.read(every // images)["labels"].copy()
    for row in answers:
        if rng.random() < 0.6:
            row[rng.integers(2)] = rng.integers(2, 6)
    return (
        asked,
        asked.symmetric.image(answers, every % images),
        rng.normal(size=len(asked)).astype(np.float32),
    )


def reported(
    asked: VoteSet, answers: np.ndarray, sure: np.ndarray, cuts: list[int], order: list[int]
) -> Mapping[str, float]:
    """By ranks that see these spans of the images, gathered in some order."""
    parts = [
        np.arange(len(asked))[start:end]
        for start, end in zip([0, *cuts], [*cuts, len(asked)], strict=True)
    ]
    gathered: dict[str, list[torch.Tensor]] = defaultdict(list)
    for part in [parts[i] for i in order]:
        votes = Votes(asked)
        padded = {
            "answer": np.concatenate([answers[part], answers[:2]]),
            "q_halt_logits": np.concatenate([sure[part], sure[:2]]),
        }
        votes.add(
            part,
            {},
            Prediction({}, {name: torch.from_numpy(rows) for name, rows in padded.items()}),
        )
        for name, rows in votes.rows().items():
            gathered[name].append(rows)
    report = Votes(asked).report({name: torch.cat(rows) for name, rows in gathered.items()})
    assert report.line == f"vote_exact_accuracy {report.metrics['vote_exact_accuracy']:.4f}"
    return report.metrics


def test_votes_are_counted_as_a_naive_count_has_it() -> None:
    examples, images = boards(40), 5
    asked, answers, sure = made_up(examples, images)
    original = asked.symmetric.original(answers, np.arange(len(asked)) % images)
    solved = 0
    for example, label in enumerate(examples.read(np.arange(40))["labels"]):
        mine = slice(example * images, (example + 1) * images)
        weight: Counter[tuple[int, ...]] = Counter()
        for answer, logit in zip(original[mine], sure[mine], strict=True):
            weight[tuple(answer)] += 1 / (1 + np.exp(-float(logit)))
        solved += tuple(label) == max(weight, key=weight.__getitem__)
    assert 5 < solved < 40
    found = reported(asked, answers, sure, [], [0])
    assert found == {"vote_exact_accuracy": solved / 40}
    assert reported(asked, answers, sure, [33, 101], [2, 0, 1]) == found
    assert tuple(found) == Votes.scalars
    assert Votes(asked).report(Votes(asked).rows()).metrics == {}


def test_the_surest_answer_wins_and_the_first_of_equals() -> None:
    answers = np.array([[[2, 2], [3, 3], [3, 3]]])
    assert elect(answers, np.array([[0.9, 0.5, 0.5]])).tolist() == [[3, 3]]
    assert elect(answers, np.array([[0.9, 0.3, 0.5]])).tolist() == [[2, 2]]
    assert elect(answers, np.array([[0.5, 0.25, 0.25]])).tolist() == [[2, 2]]


def test_a_source_asks_about_images_of_its_test_sets() -> None:
    embedded = {"size": 4, "train": 40, "test": 10, "blanks": 7}
    made = make_source(
        "puzzles",
        seed=0,
        shards=2,
        global_batch_size=8,
        epochs=1,
        embedded=embedded,
        evaluators=["vote"],
        votes=3,
    )
    assert {name: len(examples) for name, examples in made.eval_sets().items()} == {
        "all": 10,
        "all-votes": 30,
    }
    assert [type(one) for one in made.evaluators("all-votes")] == [Votes]
    assert Votes not in [type(one) for one in made.evaluators("all")]
