"""Which rows of a tensor a rank or a file holds. Without torch, as a checkpoint's digest is."""

from __future__ import annotations

from typing import NamedTuple


class RowRange(NamedTuple):
    """The rows first … stop - 1 of a tensor that has `of` rows. A scalar has one row."""

    first: int
    stop: int
    of: int
