"""Sudoku boards that need search: walks from puzzle to puzzle on one solved board, each towards a
larger tree of guesses.

A step gives a few more cells, then takes away whatever the puzzle can lack, the new cells last. The
walk goes on from there if a search has to guess at least as often as before. Many walks go side by
side, each at its own pace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from data.recursive.sudoku import geometry, random_solutions, search, to_digits, to_masks
from data.recursive.sudoku_sets import cell_permutations

WALKS = 2  # side by side, for each board that a job makes
BOARDS = 128  # that one job makes
# cells given at each step: with more a step rarely leads on, with fewer it rarely leads anywhere
# new
EXTRA = 3
# under symmetries of each puzzle, all searched: or walks would find what is hard only as its cells
# happen to stand
IMAGES = 8
REMEMBERED = 128  # other boards that a walk keeps in mind
PATIENCE = 200  # steps of every walk without a new board, after which the search ends
LAST = 9  # after every cell that has a turn


class Hard(NamedTuple):
    """Puzzles that can lack no digit, their solutions, and how often a search has to guess until it
    knows that there is no other.
    """

    puzzles: np.ndarray
    answers: np.ndarray
    guesses: np.ndarray


class Walks:
    """One walk a row. A puzzle is a solved board and which of its cells are given."""

    def __init__(self, size: int, count: int, rng: np.random.Generator) -> None:
        cells = size * size
        self.size, self.rng = size, rng
        self.answers = np.empty((count, cells), np.uint8)
        # where each cell's content comes from
        self.images = np.empty((count, IMAGES, cells), np.int32)
        # where other boards differ from the answer: of each of them a puzzle gives a cell, or it
        # has two solutions
        self.others = np.empty((count, REMEMBERED, cells), np.float32)
        self.remembered = np.empty(count, np.int64)
        self.given = np.empty((count, cells), bool)  # of the best puzzle so far
        self.guesses = np.empty((count, IMAGES), np.int64)
        # given cells of the next puzzle, some of which may not be needed
        self.trial = np.empty((count, cells), bool)
        self.turn = np.empty((count, cells))  # the order in which it is asked of them
        self.begin(np.arange(count))

    def begin(self, rows: np.ndarray) -> None:
        """New walks in the place of these, each from a whole solved board."""
        self.answers[rows] = random_solutions(len(rows), self.size, self.rng)
        self.images[rows] = cell_permutations(self.size, len(rows) * IMAGES, self.rng).reshape(
            len(rows), IMAGES, -1
        )
        self.others[rows], self.remembered[rows], self.given[rows], self.guesses[rows] = (
            0,
            0,
            True,
            -1,
        )
        self.trial[rows], self.turn[rows] = True, self.rng.random(self.turn[rows].shape)

    def go_on(self) -> np.ndarray:
        """Ask every walk's next cell whether it is needed; returns the walks that have asked all,
        whose puzzle is now compared.
        """
        # the only given cell in which some other board differs is needed: of most cells it is known
        # without a search
        alone = np.matmul(self.others, self.trial[:, :, None].astype(np.float32))[:, :, 0] == 1
        needed = np.matmul(alone[:, None].astype(np.float32), self.others)[:, 0] > 0
        turn = np.where(self.trial & ~needed, self.turn, LAST)
        cell = turn.argmin(axis=1)
        asking = turn[np.arange(len(cell)), cell] < LAST
        self._ask(np.flatnonzero(asking), cell[asking])
        done = np.flatnonzero(~asking)
        self._compare(done)
        return done

    def _ask(self, rows: np.ndarray, cell: np.ndarray) -> None:
        """Take the cell away if the solution stays unique; if not, remember the other one."""
        masks, column = (
            to_masks(np.where(self.trial[rows], self.answers[rows], 0), self.size),
            np.arange(len(rows)),
        )
        # it was unique: it stays so if no solution has another digit in this cell
        masks[cell, column] = geometry(self.size).full & ~masks[cell, column]
        found = search(masks, self.size, limit=1)
        free = found.counts == 0
        self.trial[rows[free], cell[free]] = False
        self.turn[rows, cell] = LAST
        rows, other = rows[~free], to_digits(found.solutions[:, ~free])
        self.others[rows, self.remembered[rows] % REMEMBERED] = other != self.answers[rows]
        self.remembered[rows] += 1

    def _compare(self, rows: np.ndarray) -> None:
        """Keep these walks' new puzzles where they are no easier than the last ones."""
        puzzles = np.where(self.trial[rows], self.answers[rows], np.uint8(0))
        images = np.take_along_axis(puzzles[:, None], self.images[rows], axis=2).reshape(
            -1, self.size**2
        )
        guesses = search(to_masks(images, self.size), self.size, limit=2).guesses.reshape(
            -1, IMAGES
        )
        better = guesses.sum(axis=1) >= self.guesses[rows].sum(axis=1)
        self.given[rows[better]], self.guesses[rows[better]] = (
            self.trial[rows[better]],
            guesses[better],
        )

    def step(self, rows: np.ndarray) -> None:
        """Begin the next puzzle of these walks: a few cells more, which are asked last."""
        given = self.given[rows]
        extra = (self.rng.random(given.shape) + given).argsort(axis=1)[:, :EXTRA]
        self.turn[rows] = self.rng.random(given.shape)
        self.trial[rows] = given
        self.trial[rows[:, None], extra] = True
        self.turn[rows[:, None], extra] += 1

    def middling(self, rows: np.ndarray) -> Hard:
        """For each puzzle, the image of median difficulty: at least half of the images take as many
        guesses.
        """
        middle = np.argsort(self.guesses[rows], axis=1, kind="stable")[:, IMAGES // 2]
        image = self.images[rows, middle]
        given, answers = (
            np.take_along_axis(one[rows], image, axis=1) for one in (self.given, self.answers)
        )
        return Hard(np.where(given, answers, np.uint8(0)), answers, self.guesses[rows, middle])


def hard_boards(
    size: int,
    count: int,
    min_guesses: int,
    seed: int,
    job: int,
    told: Callable[[int], None] = lambda _: None,
) -> Hard:
    """`count` puzzles that take as many guesses, a pure function of what is given; fewer where none
    is found for long. `told` hears of every new board.
    """
    walks = Walks(size, WALKS * count, np.random.default_rng([seed, size, min_guesses, job]))
    made = [walks.middling(np.arange(0))]
    found = steps = 0
    while found < count and steps < PATIENCE * WALKS * count:
        done = walks.go_on()
        new = walks.middling(done)
        there = new.guesses >= min_guesses
        made.append(Hard(*(part[there] for part in new)))
        walks.step(done[~there])
        steps += len(done)
        if more := int(there.sum()):
            walks.begin(done[there])
            told(min(more, count - found))
            found, steps = found + more, 0
    return Hard(*(np.concatenate(parts)[:count] for parts in zip(*made, strict=True)))


def relabel_digits(answers: np.ndarray, size: int) -> np.ndarray:
    """Solved boards with the digits of the first row in order: equal where boards differ by their
    digits' names alone.
    """
    names = np.argsort(answers[:, :size], axis=1).astype(np.uint8)
    return np.take_along_axis(names, answers.astype(np.int64) - 1, axis=1)
