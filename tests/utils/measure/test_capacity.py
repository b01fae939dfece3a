"""The layout that is chosen for given cards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from utils.measure.capacity import GIB, Card, Needs, cards_named, lay_out

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
    layout = lay_out(needs(10, 3, 2.5), cards, 16, 4, ranks=min(16, len(cards)))
    assert (layout.micro_batch_size, layout.passes) == (micro_batch_size, passes)
    assert layout.fits
    assert layout.ranks == min(16, len(cards))
    assert (
        layout.micro_batch_size * layout.passes >= 4 * layout.owned
    )  # the global batch is what it was


def test_cards_that_are_too_small_are_left_out_where_nobody_has_started_ranks() -> None:
    cards = [*CARD_16, *H100, *CARD_24, *H100]
    large = needs(20, 3, 2.5)
    assert not lay_out(large, cards, 16, 4, ranks=4).fits
    free = lay_out(large, cards, 16, 4)
    assert free.fits
    assert free.cards == [*H100, *H100]
    assert lay_out(needs(10, 3, 2.5), cards, 16, 4).ranks == 4, "none is left out that would do"
    assert lay_out(needs(500, 3, 2.5), cards, 16, 4).ranks == 4, "nor where it would not help"


def test_weights_that_are_split_leave_room() -> None:
    large = needs(80, 3, 2.5, largest=0.5)
    assert not lay_out(large, H100 * 8, 16, 4).fits
    split = lay_out(large, H100 * 8, 16, 4, split=True)
    # an eighth, what is fetched, a pass
    assert split.expected(1) == pytest.approx((10 + 2 + 3) * GIB)
    assert split.fits
    assert not lay_out(large, H100, 16, 4, split=True).fits  # one rank holds everything


def test_cards_are_written_as_numbers_of_gibibytes() -> None:
    assert [card.bytes / GIB for card in cards_named("2x80+24+1x0.5")] == [80, 80, 24, 0.5]
