"""Sudoku boards as hard as those of Sudoku-Extreme: the level of each is drawn from that dataset's
distribution.

A level is the logarithm of the guesses of a search, averaged over symmetric images of the puzzle.
As in `sudoku_hard`, walks lead from puzzle to puzzle on one solved board, towards more guesses.
Every board has its own race of walks, each on a solved board of its own: after each round the
easier half gives up, and the first walk that reaches the wanted level ends the race. The steps are
written in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from data.recursive.sudoku import geometry, random_solutions, search, to_digits, to_masks
from data.recursive.sudoku_hard import EXTRA, Hard
from data.recursive.sudoku_sets import cell_permutations
from utils.native import library

SOURCE = Path(__file__).with_name("sudoku_walks.c")
SIZE, CELLS = 9, 81
# Levels of Sudoku-Extreme's boards at every twentieth of them: log2(1 + guesses), the mean of 16
# random symmetries of each of the first 1,000 boards of its training set; guesses are those of
# `search(…, limit=2)`. The hardest twentieth (up to 9.08) counts as the share below it, or a few
# boards would take most of the time.
LEVELS = (
    *(0, 0, 0, 1.29, 1.87, 2.66, 5.72, 6.04, 6.24, 6.4, 6.54),
    *(6.66, 6.79, 6.9, 7.01, 7.15, 7.26, 7.39, 7.58, 7.89, 7.89),
)
UNIT = 1024  # in which C counts levels
ROUNDS = (250, 250, 500, 2000)  # steps of each walk that is still in the race
WALKS = 1 << len(ROUNDS) - 1  # at the start of a race; one is left for the last round
SLICE = 50  # steps between two chances for Ctrl-C
IMAGES, CHECKS = 8, 16  # as in sudoku_walks.c
WALK = np.dtype(
    [
        ("random", np.uint64), ("level", np.int64), ("extra", np.int64),
        ("known", np.uint64, (512, 2)), ("remembered", np.int64), ("answer", np.uint16, CELLS),
        ("given", np.uint8, CELLS), ("image", np.uint8, (IMAGES + CHECKS, CELLS)),
        ("unit", np.uint8, (3 * SIZE, SIZE)),
        ("stack", np.dtype([("cell", np.uint16, CELLS), ("owner", np.int32)], align=True), 2048),
    ],
    align=True,
)  # fmt: skip


def wanted_levels(count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns levels evenly spread over the distribution, in random order."""
    share = (rng.permutation(count) + rng.random(count)) / count
    return np.interp(share, np.linspace(0, 1, len(LEVELS)), LEVELS)


@cache
def loaded() -> ctypes.CDLL | None:
    """The library; None where it cannot be compiled."""
    made = library(SOURCE)
    if made is not None:
        made.go_on.restype = made.walk_bytes.restype = ctypes.c_int64
        assert made.walk_bytes() == WALK.itemsize
    return made


class Walk:
    """A walk from puzzle to puzzle on one solved board, given as masks."""

    def __init__(self, answer: np.ndarray, rng: np.random.Generator) -> None:
        native = loaded()
        assert native is not None
        self.native, self.state = native, np.zeros((), WALK)
        self.state["random"] = rng.integers(1 << 64, dtype=np.uint64)
        self.state["extra"], self.state["answer"] = EXTRA, answer
        self.state["image"] = cell_permutations(SIZE, IMAGES + CHECKS, rng)
        self.state["unit"] = geometry(SIZE).units
        self.native.begin(self._here)

    @property
    def _here(self) -> ctypes.c_void_p:
        return self.state.ctypes.data_as(ctypes.c_void_p)

    @property
    def level(self) -> float:
        """The mean of the images that lead the walk; a step never lowers it."""
        return float(self.state["level"]) / (UNIT * IMAGES)

    @property
    def puzzle(self) -> np.ndarray:
        """As digits."""
        return np.where(self.state["given"], self.answer, np.uint8(0))

    @property
    def answer(self) -> np.ndarray:
        """As digits."""
        return to_digits(self.state["answer"][:, None])[0]

    def image_guesses(self) -> np.ndarray:
        """How often a search guesses in each image: those that lead the walk, then the checks."""
        guesses = np.zeros(IMAGES + CHECKS, np.int64)
        self.native.measure(self._here, guesses.ctypes.data_as(ctypes.c_void_p))
        return guesses

    def reaches(self, wanted: float, steps: int) -> bool:
        """Takes this many steps, or fewer if a puzzle reaches the wanted level."""
        least = round(wanted * UNIT)
        slices = [min(SLICE, steps - first) for first in range(0, steps, SLICE)]
        numbers = ((ctypes.c_int64(least), ctypes.c_int64(more)) for more in slices)
        return any(self.native.go_on(self._here, *pair) for pair in numbers)


def race(wanted: float, rng: np.random.Generator) -> Walk:
    """The first walk whose puzzle reaches the wanted level."""
    while True:
        walks = [
            Walk(answer, rng) for answer in to_masks(random_solutions(WALKS, SIZE, rng), SIZE).T
        ]
        for steps in ROUNDS:
            for walk in walks:
                if walk.reaches(wanted, steps):
                    return walk
            walks.sort(key=lambda walk: -walk.level)
            del walks[(len(walks) + 1) // 2 :]


def extreme_boards(
    wanted: np.ndarray, seed: int, first: int, told: Callable[[int], None] = lambda _: None
) -> Hard:
    """A puzzle for each wanted level, a pure function of it, the seed and the board's number, which
    counts from `first`. `told` hears of every new board.
    """

    def boards() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, least in enumerate(wanted.tolist(), first):
            rng = np.random.default_rng([seed, SIZE, number])
            walk = race(least, rng)
            # under a symmetry by which the puzzle has not been chosen
            image = cell_permutations(SIZE, 1, rng)[0]
            yield walk.puzzle[image], walk.answer[image]
            told(1)

    puzzles, answers = map(np.array, zip(*boards(), strict=True))
    return Hard(puzzles, answers, search(to_masks(puzzles, SIZE), SIZE, limit=2).guesses)
