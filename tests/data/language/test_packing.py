"""Best-fit packing against a search through all windows, and documents of unusual lengths."""

from __future__ import annotations

import numpy as np
import pytest

from data.language.packing import best_fit, pieces_of


def room_left(lengths: np.ndarray, room: int) -> list[int]:
    """Best-fit decreasing, piece by piece; what is left in each window."""
    left: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        if fitting := [value for value in left if value >= length]:
            left.remove(best := min(fitting))
            left.append(best - length)
        else:
            left.append(room - length)
    return sorted(left)


@pytest.mark.parametrize("room", [5, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 10, 300])
def test_pieces_go_where_the_least_room_is_left(room: int, count: int) -> None:
    lengths = np.minimum(room, np.random.default_rng(count).geometric(0.1, count))
    windows = best_fit(lengths, room)
    filled = np.bincount(windows, weights=lengths).astype(int)
    assert sorted((room - filled).tolist()) == room_left(lengths, room)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([], []),
        ([9], []),
        ([9, 9, 9], [(0, 1), (1, 1)]),
        ([1, 2, 9, 1, 2, 3, 4, 5], [(0, 2), (2, 4), (6, 1)]),  # nothing follows the last 5
        ([9, 1, 2, 3, 4, 5, 6, 7, 9], [(0, 4), (4, 4)]),
        ([9, 1, 2, 3, 9, 1], [(0, 4), (4, 1)]),
    ],
)
def test_documents_are_cut_into_pieces(tokens: list[int], pieces: list[tuple[int, int]]) -> None:
    starts, lengths = pieces_of(np.array(tokens, np.uint16), 9, 4)
    assert [*zip(starts.tolist(), lengths.tolist(), strict=True)] == pieces
