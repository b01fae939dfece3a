"""Shuffled orders that are computed, not stored: a keyed permutation of 0 … n - 1, for any n, in no
memory.

A Feistel network over pairs (left, right) of numbers below `rows` and `columns`, which are near √n
each: every round adds to one half a keyed hash of the other, which can be undone, so pairs are
permuted. What falls on n or beyond, less than one place in √n, is sent through again until it does
not ("cycle walking"), which keeps it a permutation.
"""

from __future__ import annotations

import math

import numpy as np

from data.order import generator

ROUNDS = 6  # each half is mixed three times
LARGEST = 1 << 60  # so that no index overflows
DRAWN = 1 << 12  # so small orders are drawn by NumPy: too few pairs for a network to look random


class Permutation:
    """Epoch after epoch another order of the same items, as a function of (seed, stream, epoch)."""

    def __init__(self, items: int, seed: int, stream: str) -> None:
        assert 0 < items < LARGEST
        self.items = items
        self._seed, self._stream = seed, stream
        self._rows = math.isqrt(items - 1) + 1
        self._columns = -(-items // self._rows)
        # the keys of an epoch, or all of a small one's order
        self._kept: tuple[int, np.ndarray] | None = None

    def visits(self, positions: np.ndarray) -> np.ndarray:
        """Returns the items visited at these positions, which are ascending and count from the
        run's start.
        """
        items = np.empty(len(positions), np.int64)
        epochs, places = np.divmod(positions.astype(np.int64), self.items)
        first = 0
        while first < len(positions):  # mostly once
            epoch = int(epochs[first])
            stop = int(np.searchsorted(epochs, epoch, side="right"))
            items[first:stop] = self._permuted(epoch, places[first:stop])
            first = stop
        return items

    def _permuted(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self._kept is None or self._kept[0] != epoch:
            rng = generator(self._seed, f"permutation {self._stream}", epoch)
            small = self.items <= DRAWN
            self._kept = (
                epoch,
                rng.permutation(self.items)
                if small
                else rng.integers(1 << 64, size=ROUNDS, dtype=np.uint64),
            )
        if self.items <= DRAWN:
            return self._kept[1][places]
        permuted = self._network(places.astype(np.uint64))
        while len(outside := np.flatnonzero(permuted >= self.items)):
            permuted[outside] = self._network(permuted[outside])
        return permuted.astype(np.int64)

    def _network(self, places: np.ndarray) -> np.ndarray:
        assert self._kept is not None
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = np.divmod(places, columns)
        for number, key in enumerate(self._kept[1]):
            if number % 2:
                right = (right + hashed(left, key)) % columns
            else:
                left = (left + hashed(right, key)) % rows
        return left * columns + right


def hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Numbers below 2⁵³ that look random, of 64-bit numbers: the finaliser of SplitMix64."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)  # room for a sum
