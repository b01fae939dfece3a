"""A run whose length `max_steps` gives has no number of epochs: one iteration that never ends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from data.order import Order, cut_steps
from tests.making import make_source
from utils.errors import ConfigError

SIZES = {"uniform": np.full(10, 2), "ragged": np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])}


def spans(kind: str, epochs: int | None, interval: int | None, steps: int) -> list[tuple[int, int]]:
    length = cut_steps(Order(0, np.arange(10)), SIZES[kind], 8, epochs, interval)
    return [length.span(step) for step in range(steps)]


@pytest.mark.parametrize("kind", SIZES)
def test_it_is_the_beginning_of_any_longer_iteration(kind: str) -> None:
    """Nothing is dropped at the ends of the pieces in which it is found."""
    endless = spans(kind, None, None, 200)
    assert endless == spans(kind, 1000, 1000, 200)
    assert all(end == start for (_, end), (start, _) in pairwise(endless))
    assert endless != spans(kind, 1000, 1, 200)


@pytest.mark.parametrize("kind", SIZES)
def test_it_ends_no_iteration_unless_an_interval_is_given(kind: str) -> None:
    order = Order(0, np.arange(10))
    endless, every = (
        cut_steps(order, SIZES[kind], 8, None, None),
        cut_steps(order, SIZES[kind], 8, None, 2),
    )
    assert not any(endless.ends_iteration(done) for done in range(100))
    counted = cut_steps(order, SIZES[kind], 8, 100, 2)
    for done in range(100):
        assert every.ends_iteration(done) == counted.ends_iteration(done)
        assert every.span(done) == counted.span(done)
    assert any(every.ends_iteration(done) for done in range(100))


@pytest.mark.parametrize("kind", SIZES)
def test_epochs_are_still_counted(kind: str) -> None:
    order = Order(0, np.arange(10))
    steps = cut_steps(order, SIZES[kind], 8, 1000, 1000).per_epoch
    for interval in (None, 50):
        assert cut_steps(order, SIZES[kind], 8, None, interval).per_epoch == pytest.approx(
            steps, rel=0.2
        )


def test_a_batch_larger_than_the_data_is_no_mistake_there() -> None:
    assert len({*spans("ragged", None, None, 3)}) == 3
    length = cut_steps(Order(0, np.arange(10)), SIZES["uniform"], 64, None, None)
    assert length.span(1) == (32, 64)
    with pytest.raises(ConfigError, match="not one full batch"):
        cut_steps(Order(0, np.arange(10)), SIZES["uniform"], 64, 1, None)


def test_a_source_needs_no_epochs() -> None:
    source = make_source("digits", seed=0, shards=2, global_batch_size=64, epochs=None)
    assert source.length.steps_per_epoch == 1437 / 64
    assert len(source.train_batch(1000, 1)["labels"]) == 32
