"""Shuffled orders that are computed, not stored: a keyed permutation of 0 … n - 1 for any n.

It is a Feistel network over pairs (left, right) of numbers below `rows` and `columns`, both near
√n. Every round adds a keyed hash of one half to the other. That can be undone, so pairs are
permuted. A result of n or more, which less than one in √n is, goes through the network again until
it is below n ("cycle walking"); that keeps it a permutation.
"""

from __future__ import annotations

import math

import numpy as np

from data.order import generator

ROUNDS = 6  # each half is mixed three times
LARGEST = 1 << 60  # larger indices could overflow
DRAWN = 1 << 12  # NumPy draws smaller orders: with few pairs, the network does not look random


class Permutation:
    """Another order of the same items in each epoch, as a function of (seed, stream, epoch)."""

    def __init__(self, items: int, seed: int, stream: str) -> None:
        assert 0 < items < LARGEST
        self.items = items
        self._seed, self._stream = seed, stream
        self._rows = math.isqrt(items - 1) + 1
        self._columns = -(-items // self._rows)
        # an epoch with the keys of its network, or if it is small, with its whole order
        self._kept: tuple[int, np.ndarray] | None = None

    def visits(self, positions: np.ndarray) -> np.ndarray:
        """Returns the items visited at these positions. They ascend, and count from the start of
        the run.
        """
        items = np.empty(len(positions), np.int64)
        epochs, within = np.divmod(positions.astype(np.int64), self.items)
        first = 0
        while first < len(positions):  # once, unless the positions span several epochs
            epoch = int(epochs[first])
            stop = int(np.searchsorted(epochs, epoch, side="right"))
            items[first:stop] = self._permute(epoch, within[first:stop])
            first = stop
        return items

    def _permute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
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
            return self._kept[1][positions]
        permuted = self._network(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(permuted >= self.items)):
            permuted[outside] = self._network(permuted[outside])
        return permuted.astype(np.int64)

    def _network(self, positions: np.ndarray) -> np.ndarray:
        assert self._kept is not None
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = np.divmod(positions, columns)
        for number, key in enumerate(self._kept[1]):
            if number % 2:
                right = (right + hashed(left, key)) % columns
            else:
                left = (left + hashed(right, key)) % rows
        return left * columns + right


def hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hashes 64-bit numbers to numbers below 2⁵³, by the finaliser of SplitMix64."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)  # room for a sum
