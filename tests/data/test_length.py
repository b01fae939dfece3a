"""How long a run is, and when it is evaluated: in epochs, in steps, in both."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from data.order import Order, cut_steps, run_length
from tests.making import make_source

SIZES = {"uniform": np.full(10, 2), "ragged": np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])}


def due(
    kind: str, epochs: int | None, interval: int | None, max_steps: int | None, every: int | None
) -> tuple[int, list[int]]:
    length = run_length(
        cut_steps(Order(0, np.arange(10)), SIZES[kind], 10, epochs, interval), 10, max_steps, every
    )
    return length.total_steps, [
        done for done in range(length.total_steps + 1) if length.evaluates_after(done)
    ]


def test_length_and_evaluations_follow_epochs_or_steps() -> None:
    assert due("uniform", 6, 2, None, None) == (12, [4, 8, 12])
    assert due("uniform", 6, None, None, None) == (12, [12])
    assert due("uniform", 6, 2, 10, None) == (10, [4, 8, 10]), "always after the last step"
    assert due("uniform", 6, 2, 14, None) == (14, [4, 8, 12, 14]), "batches go on"
    assert due("uniform", None, None, 7, None) == (7, [7])
    assert due("uniform", None, None, 7, 3) == (7, [3, 6, 7])
    assert due("uniform", 6, 2, None, 5) == (12, [4, 5, 8, 10, 12]), "whichever comes"


def test_ragged_epochs_end_where_they_end() -> None:
    total, evaluations = due("ragged", 6, 2, None, None)
    assert evaluations[-1] == total
    assert len(evaluations) == 3
    longer, more = due("ragged", 6, 2, None, 4)
    assert (longer, set(more)) == (total, {*evaluations, *range(4, total + 1, 4)})


@pytest.mark.parametrize("kind", SIZES)
def test_it_can_be_sent_to_another_process(kind: str) -> None:
    """Workers that are not forked receive the source, and its length with it."""
    length = run_length(cut_steps(Order(0, np.arange(10)), SIZES[kind], 10, 6, 2), 10, None, 5)
    sent = pickle.loads(pickle.dumps(length))
    assert [sent.evaluates_after(done) for done in range(15)] == [
        length.evaluates_after(done) for done in range(15)
    ]
    assert (sent.examples_per_update, sent.steps_per_epoch) == (10, length.steps_per_epoch)


@pytest.mark.parametrize("source", ["digits", "puzzles"])
def test_sources_pass_on_what_they_are_given(source: str) -> None:
    more = (
        {"embedded": {"size": 4, "train": 40, "test": 10, "blanks": 7}}
        if source == "puzzles"
        else {}
    )
    length = make_source(
        source,
        seed=0,
        shards=2,
        global_batch_size=8,
        epochs=None,
        max_steps=9,
        eval_every_steps=4,
        **more,
    ).length
    assert (length.total_steps, length.examples_per_update) == (9, 8)
    assert [done for done in range(10) if length.evaluates_after(done)] == [4, 8, 9]
