"""The layout that is chosen for given cards."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from utils.plan.cards import GIB, Cards, cards_named, cards_of
from utils.plan.layout import best, layouts
from utils.plan.needs import Movable, Needs
from utils.plan.settle import table


def gpus(number: int, size: float) -> Cards:
    return Cards(number, int(size * GIB))


def needs(state: float, first: float, each: float, largest: float = 0) -> Needs:
    """In GiB: weights and gradients a quarter of the state each, what is remembered a half."""
    return Needs(
        trained=int(state * GIB / 4),
        gradients=int(state * GIB / 4),
        remembered=int(state * GIB / 2),
        averaged=0,
        frozen=0,
        largest=int(largest * GIB),
        first=int(first * GIB),
        each=int(each * GIB),
        parameters=1_234_567,
    )


# a net of 10 GiB with its optimizer, of which a shard takes 3 GiB and each further one 2.5; 16
# shards of 4 examples
@pytest.mark.parametrize(
    ("cards", "ranks", "micro_batch_size", "passes"),
    [
        (gpus(1, 141), 1, 64, 1),  # 50.5 of 129
        (gpus(1, 40), 1, 32, 2),  # 10 fit, of which two halves of 8 remain
        (gpus(3, 40), 3, 24, 1),  # 6 + 5 + 5 shards
        (gpus(3, 24), 3, 12, 2),  # 4 fit, but 3 + 3 are as fast
        (gpus(32, 16), None, 4, 1),  # no more ranks than shards
    ],
)
def test_as_much_at_once_as_fits_and_no_more_than_helps(
    cards: Cards, ranks: int | None, micro_batch_size: int, passes: int
) -> None:
    layout = best(layouts(needs(10, 3, 2.5), cards, 16, 4, ranks=ranks))
    assert (layout.micro_batch_size, layout.passes) == (micro_batch_size, passes)
    assert layout.fits
    assert layout.ranks == min(16, cards.number)
    assert (
        layout.micro_batch_size * layout.passes >= 4 * layout.owned
    )  # the global batch is what it was


# two frozen models of 14 and 12 GiB; of what trains 2, a shard 1 and each further one 0.5
WITH_MODELS = replace(
    needs(2, 1, 0.5),
    frozen=26 * GIB,
    movable=[Movable(14 * GIB, 0.5), Movable(12 * GIB, 0.4)],
)


@pytest.mark.parametrize(
    ("cards", "ranks", "devices", "micro_batch_size"),
    [
        (gpus(1, 80), 1, 1, 64),
        (gpus(2, 80), 2, 1, 32),  # large cards: data parallel takes half the time
        (gpus(2, 24), 1, 2, 32),  # a model on each, and 9 shards: 2 + 14 + 1 + 0.5 × 8 of 21.4
        (gpus(4, 24), 2, 2, 32),
        (gpus(5, 24), 2, 2, 32),  # one is left over
    ],
)
def test_models_are_spread_where_they_do_not_fit_together(
    cards: Cards, ranks: int, devices: int, micro_batch_size: int
) -> None:
    layout = best(layouts(WITH_MODELS, cards, 16, 4))
    assert layout.fits
    assert (layout.ranks, layout.devices) == (ranks, devices)
    assert layout.micro_batch_size == micro_batch_size


def test_ways_and_how_long_a_step_takes() -> None:
    ways = layouts(WITH_MODELS, gpus(4, 80), 16, 4)
    assert [(way.ranks, way.devices) for way in ways] == [(4, 1), (2, 2)]
    # 4 of 16 shards; and 8, of which both models are computed at the same time
    assert [way.work for way in ways] == pytest.approx([4 / 16, 8 / 16 * (0.1 + 0.5)])
    rows = table(ways[0], False, ways).splitlines()
    assert "data parallel     4 × 1 cards" in rows[-2]
    assert "a model per card  2 × 2 cards" in rows[-1]
    assert "1.20 × the fastest step" in rows[-1]


def test_ranks_that_have_started_take_cards_to_spare() -> None:
    spare = best(layouts(WITH_MODELS, gpus(2, 24), 16, 4, ranks=1))
    assert (spare.devices, spare.fits) == (2, True)
    without = best(layouts(WITH_MODELS, gpus(2, 24), 16, 4, ranks=2))
    assert (without.devices, without.fits) == (1, False)


def test_weights_that_are_split_leave_room() -> None:
    large = needs(80, 3, 2.5, largest=0.5)
    assert not best(layouts(large, gpus(8, 80), 16, 4)).fits
    split = best(layouts(large, gpus(8, 80), 16, 4, split=True))
    # an eighth, what is fetched, a pass
    assert split.bytes_with(1) == pytest.approx((10 + 2 + 3) * GIB)
    assert split.fits
    # one rank holds everything
    assert not best(layouts(large, gpus(1, 80), 16, 4, split=True)).fits


def test_cards_are_written_as_a_number_and_gibibytes() -> None:
    assert cards_named("2x80") == gpus(2, 80)
    assert cards_named("4.5") == gpus(1, 4.5)


def test_the_smallest_stands_for_all_and_hosts_are_shared() -> None:
    ranks = [(24, "a", "host 0", 2), (80, "b", "host 1", 1), (80, "b", "host 1", 1)]
    every = [json.dumps((size * GIB, *more)) for size, *more in ranks]
    dist: Any = SimpleNamespace(device=torch.device("cpu"), all_gather_text=lambda _: every)
    assert cards_of(dist) == Cards(3, 24 * GIB, "a", is_gpu=False)
    every.pop(0)
    assert cards_of(dist) == Cards(2, 40 * GIB, "b", is_gpu=False)
