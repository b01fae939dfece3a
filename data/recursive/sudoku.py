"""The rules of Sudoku of size 4, 6, 9 and 16, and a solver of many boards at once.

Boards are digits, 0 for blank, one row of cells each (N, cells). In datasets, a digit d is token
d + 1, and 0 is padding. Inside the solver a board is one column of bit masks, one bit per digit
that a cell may still hold: (cells, N), so that every operation runs along the boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

# N boards, U units: rows, columns and boxes

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3), 16: (4, 4)}  # size: rows and columns of a box
DIGITS = "0123456789ABCDEFG"  # as a board is written, by their values
BLANK = 1  # its token; 0 is padding
# boards searched together: bounds memory, and makes the search go deep before it goes wide
WIDTH = 4096
NARROW = 16  # boards searched together if they have very many solutions
# guesses at which `solve` gives up; a board of size 9 with one solution takes fewer
DEEP = 20_000
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Geometry:
    """Which cells share a row, a column or a box."""

    size: int
    units: np.ndarray  # (3 * size, size) cells of each unit
    units_of: np.ndarray  # (3, cells) the row, column and box of each cell

    @property
    def cells(self) -> int:
        return self.size**2

    @property
    def full(self) -> np.uint16:
        """The mask of a cell about which nothing is known."""
        return np.uint16((1 << self.size) - 1)


@cache
def geometry(size: int) -> Geometry:
    height, width = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // height * (size // width) + column // width
    units_of = np.stack([row, size + column, 2 * size + box])
    units = np.argsort(units_of, axis=1, kind="stable").reshape(3 * size, size)
    return Geometry(size, units, units_of)


def is_solved(boards: np.ndarray, size: int) -> np.ndarray:
    """True for boards that hold every digit once in every row, column and box."""
    geo = geometry(size)
    bits = np.where(boards > 0, 1 << np.clip(boards.astype(np.int64) - 1, 0, 15), 0)
    return (np.bitwise_or.reduce(bits[:, geo.units], axis=2) == geo.full).all(axis=1)


def reveal(
    inputs: np.ndarray, labels: np.ndarray, most: float, rng: np.random.Generator
) -> np.ndarray:
    """Fills in some blanks of half of the boards, each blank with a probability that is drawn for
    its board, up to `most`. So a net that could learn its boards by heart sees ever new ones.
    """
    share = rng.uniform(0, most, (len(inputs), 1)) * (rng.random((len(inputs), 1)) < 0.5)
    shown = (inputs == BLANK) & (labels > BLANK) & (rng.random(inputs.shape) < share)
    return np.where(shown, labels, inputs).astype(inputs.dtype)


def against_rules(answer: np.ndarray) -> np.ndarray:
    """Returns which cells of a board of tokens hold no digit, or one that a unit has twice."""
    geo = geometry(round(len(answer) ** 0.5))
    board = answer.astype(np.int64) - BLANK
    wrong = (board < 1) | (board > geo.size)
    for unit in geo.units:
        wrong[unit] |= (board[unit][:, None] == board[unit]).sum(1) > 1
    return wrong


def to_masks(boards: np.ndarray, size: int) -> np.ndarray:
    """Returns one bit for a given digit, all bits for a blank."""
    bits = np.uint16(1) << (np.maximum(boards, 1) - 1).astype(np.uint16)
    return np.ascontiguousarray(np.where(boards > 0, bits, geometry(size).full).T)


def to_digits(masks: np.ndarray) -> np.ndarray:
    """Returns boards from masks with one bit per cell."""
    return np.ascontiguousarray(np.round(np.log2(masks)).astype(np.uint8).T + np.uint8(1))


def propagate(masks: np.ndarray, geo: Geometry) -> np.ndarray:
    """Fills in naked and hidden singles, in place. Returns which boards are still possible."""
    possible = np.ones(masks.shape[1], bool)
    live = np.arange(masks.shape[1])  # boards that changed in the last round
    work = masks
    # only boards that changed can change again
    while len(live):
        reduced, consistent = _one_round(work, geo)
        changed = (reduced != work).any(axis=0) & consistent
        masks[:, live] = reduced
        possible[live] = consistent
        live, work = live[changed], reduced[:, changed]
    return possible


def _one_round(masks: np.ndarray, geo: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """Returns the masks after one round of both rules, and which boards are still possible."""
    row, column, box = geo.units_of
    # a mask with one bit is a digit: x & (x - 1) takes away the lowest bit
    fixed = np.where(masks & (masks - np.uint16(1)), np.uint16(0), masks)
    digits = fixed[geo.units]  # (U, size, N)
    taken = np.bitwise_or.reduce(digits, axis=1)  # (U, N)
    # The digits of a unit are powers of two: their sum equals their union only where none stands
    # twice. The sum of sixteen digits has more bits than their union.
    wide = np.uint32 if geo.size > 9 else np.uint16
    consistent = (digits.sum(axis=1, dtype=wide) == taken).all(axis=0)

    # naked singles: no other cell of a unit may hold a digit that one holds
    masks = np.where(fixed, masks, masks & ~(taken[row] | taken[column] | taken[box]))

    # hidden singles: a digit that has one place left in a unit belongs there
    # `once` collects digits seen in any cell, `more` those seen in a second one
    once, more = np.zeros_like(taken), np.zeros_like(taken)
    for cell in range(geo.size):
        member = masks[geo.units[:, cell]]
        more |= once & member
        once |= member
    consistent &= (once == geo.full).all(axis=0)  # every digit still has a place in every unit
    once &= ~more
    hidden = masks & (once[row] | once[column] | once[box])
    masks = np.where(hidden, hidden, masks)
    # no cell must hold two digits at once
    consistent &= ((hidden & (hidden - np.uint16(1))) == 0).all(axis=0)
    return masks, consistent & (masks > 0).all(axis=0)


class Found(NamedTuple):
    """The result of a search, for each board."""

    counts: np.ndarray  # how many solutions, up to the limit
    guesses: np.ndarray
    solutions: np.ndarray  # one of them as masks, (cells, N); zeros where there is none


def search(
    masks: np.ndarray, size: int, limit: int, most_guesses: int = UNLIMITED, width: int = WIDTH
) -> Found:
    """Counts the solutions of each board, up to `limit`, and the guesses that the search takes. It
    guesses in the cell with the fewest candidates.

    A board that takes more than `most_guesses` is given up; its count is `limit`.
    """
    geo = geometry(size)
    counts, guesses = np.zeros((2, masks.shape[1]), np.int64)
    solutions = np.zeros_like(masks)
    # boards in which guesses were made, and the board that each comes from
    stack, owners = masks.copy(), np.arange(masks.shape[1])
    while len(owners):
        # the newest boards first: deep before wide, which bounds the memory
        top, top_owners = np.ascontiguousarray(stack[:, -width:]), owners[-width:]
        stack, owners = stack[:, :-width], owners[:-width]
        possible = propagate(top, geo)
        top, top_owners = top[:, possible], top_owners[possible]

        # count the boards that are solved without a further guess
        candidates = np.bitwise_count(top)
        solved = (candidates == 1).all(axis=0)
        np.add.at(counts, top_owners[solved], 1)
        solutions[:, top_owners[solved]] = top[:, solved]

        # guess in what is left, but not for boards with enough solutions
        going = ~solved & (counts[top_owners] < limit)
        top, top_owners, candidates = top[:, going], top_owners[going], candidates[:, going]
        np.add.at(guesses, top_owners, 1)
        counts[guesses > most_guesses] = limit
        cell = np.where(candidates > 1, candidates, 99).argmin(axis=0)
        board = np.arange(len(cell))
        lowest = top[cell, board] & -top[cell, board]  # the lowest bit alone
        others = top.copy()  # the same boards without that digit, for later
        others[cell, board] ^= lowest
        top[cell, board] = lowest
        # both halves go on, the guessed digit on top; boards with enough solutions are dropped
        wanted = counts[owners] < limit
        stack = np.concatenate([stack[:, wanted], others, top], axis=1)
        owners = np.concatenate([owners[wanted], top_owners, top_owners])
    return Found(np.minimum(counts, limit), guesses, solutions)


def solve(inputs: np.ndarray, deep: int = DEEP) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many solutions boards of tokens have (2: several, -1: the search takes too long),
    and the tokens of one of them; zeros if there is none.
    """
    size = round(inputs.shape[1] ** 0.5)
    counts, solutions = np.full(len(inputs), -1), np.zeros_like(inputs)
    # a board with few clues has so many solutions that a wide search does not get to the bottom
    for width in (WIDTH, NARROW):
        left = np.flatnonzero(counts < 0)
        for start in range(0, len(left), width):
            rows = left[start : start + width]
            masks = to_masks(inputs[rows].astype(np.int64) - BLANK, size)
            found = search(masks, size, limit=2, most_guesses=deep, width=width)
            counts[rows] = np.where(found.guesses > deep, -1, found.counts)
            solved = counts[rows] > 0
            solutions[rows[solved]] = to_digits(found.solutions[:, solved]) + BLANK
    return counts, solutions
