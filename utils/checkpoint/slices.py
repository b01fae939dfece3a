"""Rows of tensors: which of them a rank holds, and which of them it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Rows(NamedTuple):
    """Rows of a whole tensor."""

    first: int
    stop: int
    of: int  # how many it has


class Slice(NamedTuple):
    """Rows of a whole tensor, and their content."""

    tensor: Tensor
    first: int
    of: int

    @classmethod
    def whole(cls, tensor: Tensor) -> Slice:
        return cls(tensor, 0, len(tensor) if tensor.ndim else 1)


def dealt(slices: Mapping[str, Slice], parts: int) -> list[dict[str, Slice]]:
    """Cuts tensors, laid end to end, into parts of nearly equal bytes, between rows.

    A row belongs to the part in which its first byte lies.
    """
    total = sum(piece.tensor.nbytes for piece in slices.values())
    ends = [total * (part + 1) // parts for part in range(parts - 1)]
    found: list[dict[str, Slice]] = [{} for _ in range(parts)]
    at = 0
    for name, (tensor, first, of) in slices.items():
        rows = len(tensor) if tensor.ndim else 1
        size = tensor.nbytes // rows if rows else 0
        cuts = [0, *(_rows_before(end - at, size, rows) for end in ends), rows]
        for part in range(parts):
            start, stop = cuts[part : part + 2]
            if stop - start == rows > 0:
                found[part][name] = Slice(tensor, first, of)
            elif stop > start:
                found[part][name] = Slice(tensor[start:stop], first + start, of)
        if not rows:
            found[0][name] = Slice(tensor, first, of)
        at += tensor.nbytes
    return found


def _rows_before(bytes_: int, size: int, rows: int) -> int:
    """How many rows of a size begin within so many bytes."""
    if size == 0:  # of rows without content, all or none
        return rows if bytes_ > 0 else 0
    return min(max(-(-bytes_ // size), 0), rows)
