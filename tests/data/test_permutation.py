"""Orders that are computed: every item once an epoch, another order each epoch, nothing stored; and
shares that hold at any moment.
"""

from __future__ import annotations

import numpy as np
import pytest

from data.language.tokens import Mixture
from data.permutation import DRAWN, Permutation


@pytest.mark.parametrize("items", [1, 2, 7, DRAWN, DRAWN + 1, 65_537, 300_007])
def test_every_item_comes_once_an_epoch_in_another_order(items: int) -> None:
    order = Permutation(items, 0, "a")
    visits = order.visits(np.arange(3 * items))
    for epoch in visits.reshape(3, items):
        assert np.array_equal(np.sort(epoch), np.arange(items))
    if items > 100:
        same = [
            (visits[:items] == other).mean()
            for other in (np.arange(items), visits[items : 2 * items], visits[2 * items :])
        ]
        same += [
            (visits[:items] == Permutation(items, *other).visits(np.arange(items))).mean()
            for other in ((1, "a"), (0, "b"))
        ]
        assert max(same) < 0.01
    there = np.random.default_rng(0).integers(3 * items, size=50)
    for position in there.tolist():
        assert Permutation(items, 0, "a").visits(np.array([position])) == visits[position], (
            "a function of the position alone"
        )


def test_a_computed_order_looks_drawn() -> None:
    """Neighbours are no neighbours, and a part of the order is spread over all items as one that is
    drawn.
    """
    items, part = 1_000_003, 100_000
    visits = Permutation(items, 0, "a").visits(np.arange(part))
    assert abs(np.corrcoef(visits[:-1], visits[1:])[0, 1]) < 0.02
    counts = np.histogram(visits, 100, (0, items))[0]
    chi_squared = ((counts - part / 100) ** 2 / (part / 100 * (1 - part / items))).sum()
    assert 50 < chi_squared < 160  # 99 on average, 14 is its standard deviation
    steps = np.diff(np.sort(visits))
    assert abs(steps.std() / steps.mean() - np.sqrt(1 - part / items)) < 0.02


def test_an_order_of_many_items_takes_no_memory() -> None:
    items = 10**11
    visits = Permutation(items, 0, "a").visits(np.arange(items - 500, items + 500))
    assert visits.min() >= 0
    assert visits.max() < items
    assert len(np.unique(visits)) == 1000


WEIGHTS = [[0.7, 0.3], [1], [5, 3, 1, 1e-2], [1] * 7, [99, 1, 1], [0.123456789, 1]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_shares_hold_at_any_moment(weights: list[float]) -> None:
    mixture = Mixture(weights)
    which, nth = mixture.visits(np.arange(250_000))
    for number, share in enumerate(np.array(weights) / sum(weights)):
        counts = np.cumsum(which == number)
        assert np.abs(counts - share * np.arange(1, 250_001)).max() < len(weights) + 1
        assert np.array_equal(nth[which == number], np.arange(counts[-1])), "once each"
