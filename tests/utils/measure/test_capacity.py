"""The layout that is chosen for given cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from utils.measure.capacity import (
    GIB,
    Card,
    Movable,
    Needs,
    cards_named,
    lay_out,
    layouts,
    table,
)

H200, H100, A100_40, CARD_24, CARD_16 = (
    [Card("GPU", size * GIB)] for size in (141, 80, 40, 24, 16)
)


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


def started(cards: Sequence[Card]) -> list[list[Card]]:
    """Ranks on the first 16 of these cards."""
    return [[card] for card in cards[:16]]


# a net of 10 GiB with its optimizer, of which a shard takes 3 GiB and each further one 2.5; 16
# shards of 4 examples
@pytest.mark.parametrize(
    ("cards", "micro_batch_size", "passes"),
    [
        (H200, 64, 1),  # 50.5 of 129
        (A100_40, 32, 2),  # 10 fit, of which two halves of 8 remain
        (A100_40 * 3, 24, 1),  # 6 + 5 + 5 shards
        (H100 * 2 + CARD_24, 12, 2),  # the least decides: 4 fit, but 3 + 3 are as fast
        (CARD_16 * 32, 4, 1),  # no more ranks than shards
    ],
)
def test_as_much_at_once_as_fits_and_no_more_than_helps(
    cards: Sequence[Card], micro_batch_size: int, passes: int
) -> None:
    layout = lay_out(needs(10, 3, 2.5), cards, 16, 4, hands=started(cards))
    assert (layout.micro_batch_size, layout.passes) == (micro_batch_size, passes)
    assert layout.fits
    assert layout.ranks == min(16, len(cards))
    assert (
        layout.micro_batch_size * layout.passes >= 4 * layout.owned
    )  # the global batch is what it was


def test_cards_that_are_too_small_are_left_out_where_nobody_has_started_ranks() -> None:
    cards = [*CARD_16, *H100, *CARD_24, *H100]
    large = needs(20, 3, 2.5)
    assert not lay_out(large, cards, 16, 4, hands=started(cards)).fits
    free = lay_out(large, cards, 16, 4)
    assert free.fits
    assert free.cards == [*H100, *H100]
    assert lay_out(needs(10, 3, 2.5), cards, 16, 4).ranks == 4, "none is left out that would do"
    assert lay_out(needs(500, 3, 2.5), cards, 16, 4).ranks == 4, "nor where it would not help"


# two frozen models of 14 and 12 GiB; of what trains 2, a shard 1 and each further one 0.5
WITH_MODELS = replace(
    needs(2, 1, 0.5),
    frozen=26 * GIB,
    movable=[Movable(14 * GIB, 0.5), Movable(12 * GIB, 0.4)],
)


@pytest.mark.parametrize(
    ("cards", "sizes", "micro_batch_size"),
    [
        (H100, [1], 64),
        (H100 * 2, [1, 1], 32),  # large cards: data parallel takes half the time
        (CARD_24 * 2, [2], 32),  # a model on each, and 9 shards: 2 + 14 + 1 + 0.5 × 8 of 21.4
        (CARD_24 * 4, [2, 2], 32),
        (H100 * 2 + CARD_24, [2, 1], 32),  # hybrid: the small one holds a model
        (H100 + CARD_16, [2], 12),  # faster than alone, three shards at once
    ],
)
def test_models_are_spread_where_they_do_not_fit_together(
    cards: Sequence[Card], sizes: Sequence[int], micro_batch_size: int
) -> None:
    layout = lay_out(WITH_MODELS, cards, 16, 4)
    assert layout.fits
    assert [len(hand) for hand in layout.hands] == sizes
    assert layout.micro_batch_size == micro_batch_size


def test_three_ways_and_how_long_a_step_takes() -> None:
    ways = layouts(WITH_MODELS, H100 * 3, 16, 4)
    assert [[len(hand) for hand in way.hands] for way in ways] == [[1, 1, 1], [2, 1]]
    # 6 of 16 shards; and 8 on a rank that computes both models one after the other
    assert [way.work for way in ways] == pytest.approx([6 / 16, 8 / 16])
    # both models at the same time, on the only rank: what trains, and the larger model
    (_, alone) = layouts(WITH_MODELS, H100 * 2, 16, 4)
    assert alone.work == pytest.approx(0.1 + 0.5)
    rows = table(ways[0], False, ways).splitlines()
    assert [row.split()[1:3] for row in rows[-2:]] == [["data", "parallel"], ["hybrid", "2"]]
    assert "1.33 × the fastest step" in rows[-1]


def test_ranks_that_have_started_take_cards_to_spare() -> None:
    """A rank with a card of its own and another that no rank uses; and one without."""
    spare = lay_out(WITH_MODELS, CARD_24 * 2, 16, 4, hands=[CARD_24 * 2])
    assert (spare.devices, spare.fits) == (2, True)
    alone = lay_out(WITH_MODELS, CARD_24, 16, 4, hands=[CARD_24])
    assert (alone.devices, alone.fits) == (1, False)


def test_weights_that_are_split_leave_room() -> None:
    large = needs(80, 3, 2.5, largest=0.5)
    assert not lay_out(large, H100 * 8, 16, 4).fits
    split = lay_out(large, H100 * 8, 16, 4, split=True)
    # an eighth, what is fetched, a pass
    assert split.fullest(1)[1] == pytest.approx((10 + 2 + 3) * GIB)
    assert split.fits
    assert not lay_out(large, H100, 16, 4, split=True).fits  # one rank holds everything


def test_cards_are_written_as_numbers_of_gibibytes() -> None:
    assert [card.bytes / GIB for card in cards_named("2x80+24+1x0.5")] == [80, 80, 24, 0.5]
