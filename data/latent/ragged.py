"""Rows of different lengths in one array, read as rows of one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EMPTY = -1  # where a row has come to its end


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
        """One of them, as long as it is."""
        return self._values[self._starts[index] : self._starts[index + 1]]

    def read(self, indices: np.ndarray, width: int) -> np.ndarray:
        """These rows, each `width` long; behind its end is EMPTY."""
        starts, stops = self._starts[indices, None], self._starts[indices + 1, None]
        places = starts + np.arange(width)
        inside = places < stops
        values = (
            self._values[np.where(inside, places, 0)]
            if len(self._values)
            else np.zeros_like(places)
        )
        return np.where(inside, values, EMPTY).astype(np.int32)
