"""Ranges of rows of tensors: which ones a rank holds, and which ones it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RowRange(NamedTuple):
    """The rows first … stop - 1 of a tensor that has `of` rows on all ranks together."""

    first: int
    stop: int
    of: int


class Slice(NamedTuple):
    """Some rows of a tensor: their content, the number of the first, and of all rows."""

    tensor: Tensor
    first: int
    of: int

    @classmethod
    def whole(cls, tensor: Tensor) -> Slice:
        return cls(tensor, 0, len(tensor) if tensor.ndim else 1)


def deal(slices: Mapping[str, Slice], parts: int) -> list[dict[str, Slice]]:
    """Cuts tensors, laid end to end, into parts of nearly equal bytes, between rows.

    A row belongs to the part in which its first byte lies.
    """
    total = sum(piece.tensor.nbytes for piece in slices.values())
    ends = [total * (part + 1) // parts for part in range(parts - 1)]
    dealt: list[dict[str, Slice]] = [{} for _ in range(parts)]
    at = 0
    for name, (tensor, first, of) in slices.items():
        rows = len(tensor) if tensor.ndim else 1
        size = tensor.nbytes // rows if rows else 0
        cuts = [0, *(_rows_before(end - at, size, rows) for end in ends), rows]
        for part in range(parts):
            start, stop = cuts[part : part + 2]
            if stop - start == rows > 0:
                dealt[part][name] = Slice(tensor, first, of)
            elif stop > start:
                dealt[part][name] = Slice(tensor[start:stop], first + start, of)
        if not rows:
            dealt[0][name] = Slice(tensor, first, of)
        at += tensor.nbytes
    return dealt


def _rows_before(bytes_: int, size: int, rows: int) -> int:
    """How many rows of a size begin within this many bytes."""
    if size == 0:  # of rows without content, all or none
        return rows if bytes_ > 0 else 0
    return min(max(-(-bytes_ // size), 0), rows)
