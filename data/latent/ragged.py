"""Stores rows of different lengths in one array, and reads them padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.spec import IGNORE

EMPTY = IGNORE  # beyond a row's end


class Ragged:
    """Tokens of many texts."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._values = (
            np.concatenate([np.asarray(row, np.int32) for row in rows])
            if len(rows)
            else np.zeros(0, np.int32)
        )
        self.longest = int(self.lengths.max(initial=0))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> np.ndarray:
        """Returns one row, without padding."""
        return self._values[self._starts[index] : self._starts[index + 1]]

    def read(self, indices: np.ndarray, width: int) -> np.ndarray:
        """Returns these rows, each cut or padded with EMPTY to `width`."""
        starts, stops = self._starts[indices, None], self._starts[indices + 1, None]
        positions = starts + np.arange(width)
        inside = positions < stops
        values = (
            self._values[np.where(inside, positions, 0)]
            if len(self._values)
            else np.zeros_like(positions)
        )
        return np.where(inside, values, EMPTY).astype(np.int32)
