"""The order in which examples are visited; how long a run is, and when it is evaluated: in
epochs, in steps, in both, or without end.
"""

from itertools import combinations, pairwise

import numpy as np
import pytest

from data.order import Order, cut_steps, run_length
from utils.errors import ConfigError


@pytest.mark.parametrize("items", [1, 7, 4096, 5000])
def test_every_item_comes_once_an_epoch_in_an_order_of_its_own(items: int) -> None:
    visits = Order(0, items).visits(0, 9 * items)
    epochs = visits.reshape(9, items)
    assert (np.sort(epochs, axis=1) == np.arange(items)).all()
    if items > 100:
        epochs = np.concatenate([epochs, Order(1, items).visits(0, items)[None]])
        assert max((one == other).mean() for one, other in combinations(epochs, 2)) < 0.05
    order = Order(0, items)
    for start in np.random.default_rng(0).integers(8 * items, size=50).tolist():
        assert (order.visits(start, start + items) == visits[start : start + items]).all()


@pytest.mark.parametrize("items", [5, 700, 5000])
def test_each_epoch_visits_each_group_once_in_its_own_order(items: int) -> None:
    counts = np.random.default_rng(0).integers(1, 4, items)
    first, owner = np.cumsum(counts) - counts, np.repeat(np.arange(items), counts)
    order = Order(7, items, (first, counts))
    visits = order.visits(0, 12 * items)
    epochs = owner[visits].reshape(12, items)
    assert (np.sort(epochs, axis=1) == np.arange(items)).all()
    assert len({epoch.tobytes() for epoch in epochs}) > 10
    if items == 700:
        everything = np.unique(order.visits(0, 60 * items))
        assert len(everything) == counts.sum(), "every puzzle of a group has its chance"
    between = slice(items // 2, 9 * items + 1)
    assert (order.visits(between.start, between.stop) == visits[between]).all()


SIZES = {"uniform": np.full(10, 2), "ragged": np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])}


def due(
    kind: str, epochs: int | None, interval: int | None, max_steps: int | None, every: int | None
) -> tuple[int, list[int]]:
    steps = cut_steps(Order(0, 10), SIZES[kind], 10, epochs, interval)
    length = run_length(steps, 10, max_steps, every)
    evaluated = filter(length.evaluates_after, range(length.total_steps + 1))
    return length.total_steps, [*evaluated]


def test_length_and_evaluations_follow_epochs_or_steps() -> None:
    assert due("uniform", 6, 2, None, None) == (12, [4, 8, 12])
    assert due("uniform", 6, None, None, None) == (12, [12])
    assert due("uniform", 6, 2, 10, None) == (10, [4, 8, 10]), "always after the last step"
    assert due("uniform", 6, 2, 14, None) == (14, [4, 8, 12, 14]), "batches go on"
    assert due("uniform", None, None, 7, None) == (7, [7])
    assert due("uniform", None, None, 7, 3) == (7, [3, 6, 7])
    assert due("uniform", 6, 2, None, 5) == (12, [4, 5, 8, 10, 12]), "whichever comes"


def spans(kind: str, epochs: int | None, interval: int | None, steps: int) -> list[tuple[int, int]]:
    length = cut_steps(Order(0, 10), SIZES[kind], 8, epochs, interval)
    return [length.span(step) for step in range(steps)]


@pytest.mark.parametrize("kind", SIZES)
def test_it_is_the_beginning_of_any_longer_iteration(kind: str) -> None:
    """Nothing is dropped at the ends of the pieces in which it is found."""
    endless = spans(kind, None, None, 200)
    assert endless == spans(kind, 1000, 1000, 200)
    assert all(end == start for (_, end), (start, _) in pairwise(endless))
    assert endless != spans(kind, 1000, 1, 200)


def test_a_batch_larger_than_the_data_is_no_mistake_there() -> None:
    assert len({*spans("ragged", None, None, 3)}) == 3
    length = cut_steps(Order(0, 10), SIZES["uniform"], 64, None, None)
    assert length.span(1) == (32, 64)
    with pytest.raises(ConfigError, match="not one full batch"):
        cut_steps(Order(0, 10), SIZES["uniform"], 64, 1, None)
