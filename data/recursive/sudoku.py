"""Sudoku of size 4, 6, 9 and 16: a solver, a generator and symmetries, for many boards at once.

Boards are digits, 0 for blank, one row of cells each (N, cells). In datasets, a digit d is token
d + 1, and 0 is padding. Inside the solver a board is one
column of bit masks, one bit per digit that a cell may still hold: (cells, N), so that every
operation runs along the boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb
from typing import NamedTuple

import numpy as np

from data.recursive.puzzle_files import PuzzleSplit, plain_split
from utils.errors import ConfigError

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3), 16: (4, 4)}  # size: rows and columns of a box
DIGITS = "0123456789ABCDEFG"  # as a board is written, by their values
PAD, BLANK = 0, 1  # tokens
# boards searched together: bounds memory, and makes the search go deep before it goes wide
WIDTH = 4096
SOLVED = {4: 288, 6: 28_200_960}  # different solved boards
MOST = 10**7  # boards of one dataset, before augmentation
ROUNDS = 30  # attempts to find enough boards before giving up
SPARE = 3  # solved boards for each puzzle that has to be hard: most puzzles of size 9 are not
FOR_EVER = 1 << 60
# guesses at which a large board counts as one of several solutions; one of size 9 never needs as
# many
TOO_DEEP = 500
TRIES = 256  # at least this many of them are tried together
# guesses at which `solve` gives up; a board of size 9 with one solution takes fewer
DEEP = 20_000
NARROW = 16  # boards searched together if there is no end of solutions
CHUNK = 1 << 15  # boards transformed together: small enough for the cache


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
    """Returns the units of a board of one of the sizes in BOXES."""
    height, width = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // height * (size // width) + column // width
    units_of = np.stack([row, size + column, 2 * size + box])
    units = np.argsort(units_of, axis=1, kind="stable").reshape(3 * size, size)
    return Geometry(size, units, units_of)


def is_solved(boards: np.ndarray, size: int) -> np.ndarray:
    """Returns whether each board holds every digit once in every row, column and box."""
    geo = geometry(size)
    bits = np.where(boards > 0, 1 << np.clip(boards.astype(np.int64) - 1, 0, 15), 0)
    return (np.bitwise_or.reduce(bits[:, geo.units], axis=2) == geo.full).all(axis=1)


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
    while len(live):
        reduced, consistent = _one_round(work, geo)
        changed = (reduced != work).any(axis=0) & consistent
        masks[:, live] = reduced
        possible[live] = consistent
        live, work = live[changed], reduced[:, changed]
    return possible


def _one_round(masks: np.ndarray, geo: Geometry) -> tuple[np.ndarray, np.ndarray]:
    fixed = np.where(masks & (masks - np.uint16(1)), np.uint16(0), masks)
    members = fixed[geo.units]
    taken = np.bitwise_or.reduce(members, axis=1)
    # digits are powers of two: their sum equals their union only where none stands twice
    # sixteen digits' sum has more bits than their union
    wide = np.uint32 if geo.size > 9 else np.uint16
    consistent = (members.sum(axis=1, dtype=wide) == taken).all(axis=0)
    row, column, box = geo.units_of
    seen = taken[row] | taken[column] | taken[box]
    masks = np.where(fixed, masks, masks & ~seen)
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
    masks: np.ndarray, size: int, limit: int, most_guesses: int = FOR_EVER, width: int = WIDTH
) -> Found:
    """Counts the solutions of each board, up to `limit`, and the guesses that the search takes. It
    guesses in the cell with the fewest candidates.

    A board that takes more than `most_guesses` is given up; its count is `limit`.
    """
    geo = geometry(size)
    counts, guesses = np.zeros((2, masks.shape[1]), np.int64)
    solutions = np.zeros_like(masks)
    stack, owners = masks.copy(), np.arange(masks.shape[1])
    while len(owners):
        top, top_owners = stack[:, -width:], owners[-width:]
        stack, owners = stack[:, :-width], owners[:-width]
        top = np.ascontiguousarray(top)
        possible = propagate(top, geo)
        top, top_owners = top[:, possible], top_owners[possible]
        choices = np.bitwise_count(top)
        solved = (choices == 1).all(axis=0)
        np.add.at(counts, top_owners[solved], 1)
        solutions[:, top_owners[solved]] = top[:, solved]
        open_ = ~solved & (counts[top_owners] < limit)
        top, top_owners, choices = top[:, open_], top_owners[open_], choices[:, open_]
        np.add.at(guesses, top_owners, 1)
        counts[guesses > most_guesses] = limit
        cell = np.where(choices > 1, choices, 99).argmin(axis=0)
        board = np.arange(len(cell))
        lowest = top[cell, board] & -top[cell, board]
        rest = top.copy()
        rest[cell, board] ^= lowest
        top[cell, board] = lowest
        keep = counts[owners] < limit
        stack = np.concatenate([stack[:, keep], rest, top], axis=1)
        owners = np.concatenate([owners[keep], top_owners, top_owners])
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
            some = left[start : start + width]
            masks = to_masks(inputs[some].astype(np.int64) - BLANK, size)
            found = search(masks, size, limit=2, most_guesses=deep, width=width)
            counts[some] = np.where(found.guesses > deep, -1, found.counts)
            solved = counts[some] > 0
            solutions[some[solved]] = to_digits(found.solutions[:, solved]) + BLANK
    return counts, solutions


def against_rules(answer: np.ndarray) -> np.ndarray:
    """Returns which cells of a board of tokens hold no digit, or one that a unit has twice."""
    geo = geometry(round(len(answer) ** 0.5))
    board = answer.astype(np.int64) - BLANK
    wrong = (board < 1) | (board > geo.size)
    for unit in geo.units:
        wrong[unit] |= (board[unit][:, None] == board[unit]).sum(1) > 1
    return wrong


def random_solutions(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws solved boards, possibly with repeats, by random guesses. Dead ends start afresh."""
    geo = geometry(size)
    found: list[np.ndarray] = []
    missing = count
    masks = np.full((geo.cells, count), geo.full)
    while missing > 0:
        choices = np.bitwise_count(masks)
        cell = np.where(choices > 1, choices + rng.random(masks.shape, np.float32) / 2, 99).argmin(
            axis=0
        )
        board = np.arange(masks.shape[1])
        bits = masks[cell, board] >> np.arange(size, dtype=np.uint16)[:, None] & 1
        digit = (bits * (1 + rng.random(bits.shape))).argmax(axis=0)
        masks[cell, board] = np.uint16(1) << digit.astype(np.uint16)
        possible = propagate(masks, geo)
        masks[:, ~possible] = geo.full
        solved = (np.bitwise_count(masks) == 1).all(axis=0)
        found.append(to_digits(masks[:, solved]))
        missing -= int(solved.sum())
        masks = masks[:, ~solved]
    # boards that came easily come first: shuffle, so that a split of the result is fair
    return rng.permutation(np.concatenate(found)[:count])


def dig(
    solutions: np.ndarray, size: int, blanks: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Blanks random cells one by one while the solution stays unique. Returns puzzles, and whether
    each got its blanks.
    """
    geo = geometry(size)
    puzzles = solutions.copy()
    order = rng.permuted(np.tile(np.arange(geo.cells), (len(puzzles), 1)), axis=1)
    for attempt in range(geo.cells):
        live = np.flatnonzero((puzzles == 0).sum(axis=1) < blanks)
        if not len(live):
            break
        cell = order[live, attempt]
        masks = to_masks(puzzles[live], size)
        # the solution was unique: it stays so if no solution has another digit in this cell
        masks[cell, np.arange(len(live))] = geo.full & ~masks[cell, np.arange(len(live))]
        unique = search(masks, size, limit=1, most_guesses=TOO_DEEP).counts == 0
        puzzles[live[unique], cell[unique]] = 0
    return puzzles, (puzzles == 0).sum(axis=1) == blanks


def generate(
    size: int, counts: tuple[int, ...], blanks: int, seed: int, min_guesses: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Generates parts of `counts` distinct puzzles with their unique solutions. No solved board
    occurs in two parts. `min_guesses` keeps only boards for which `search` guesses so often.
    """
    geo = geometry(size)
    if blanks >= geo.cells:
        raise ConfigError(
            f"blanks={blanks}: a {size}x{size} board has {geo.cells} cells; choose fewer"
        )
    if sum(counts) > (most := most_puzzles(size, blanks)):
        raise ConfigError(
            f"train={counts[0]} test={counts[-1]}: at most {most:,} different {size}x{size} puzzles"
            f" with blanks={blanks} can be made; ask for fewer"
        )
    rng = np.random.default_rng([seed, size, blanks])
    solved = _distinct_solutions(size, sum(counts) * (SPARE if min_guesses else 1), rng)
    shares = np.cumsum(counts)[:-1] * len(solved) // sum(counts)
    pools = np.split(solved, np.clip(shares, 1, len(solved) - 1))
    return [
        _puzzles(pool, count, size, blanks, min_guesses, rng)
        for pool, count in zip(pools, counts, strict=True)
    ]


def most_puzzles(size: int, blanks: int) -> int:
    """Bounds how many different puzzles can be made."""
    return min(SOLVED.get(size, MOST) * comb(size * size, blanks), MOST)


def _distinct_solutions(size: int, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Returns different solved boards, some more than wanted if there are as many: not every board
    can lose enough cells.
    """
    target = wanted + wanted // 16 + 16
    found = np.empty((0, size * size), np.uint8)
    for _ in range(ROUNDS):
        found = np.concatenate([found, random_solutions(target, size, rng)])
        found = found[_first_occurrences(found)]
        if len(found) >= target:
            break
    return found[:target]


def _puzzles(
    pool: np.ndarray, count: int, size: int, blanks: int, min_guesses: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Makes `count` distinct puzzles from a pool of solved boards, which are used again if the pool
    is small.
    """
    puzzles, answers = pool[:0], pool[:0]
    used = 0
    for _ in range(ROUNDS):
        missing = count - len(puzzles)
        chosen = pool[
            (used + np.arange(max(missing, TRIES) if min_guesses else missing)) % len(pool)
        ]
        used += len(chosen)
        dug, good = dig(chosen, size, blanks, rng)
        if min_guesses:
            good[good] = search(to_masks(dug[good], size), size, limit=2)[1] >= min_guesses
        puzzles, answers = (
            np.concatenate([puzzles, dug[good]]),
            np.concatenate([answers, chosen[good]]),
        )
        first = _first_occurrences(puzzles)[:count]
        puzzles, answers = puzzles[first], answers[first]
        if len(puzzles) == count:
            return puzzles, answers
    asked, less = (
        (f"blanks={blanks}", "blanks")
        if not min_guesses
        else (f"blanks={blanks} min_guesses={min_guesses}", "guesses")
    )
    raise ConfigError(
        f"{asked}: only {len(puzzles)} of {count} different {size}x{size} puzzles found; ask for"
        f" fewer {less} or fewer boards"
    )


def _first_occurrences(rows: np.ndarray) -> np.ndarray:
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


def sudoku_split(
    where: str, size: int, puzzles: np.ndarray, answers: np.ndarray, num_aug: int, seed: int
) -> PuzzleSplit:
    """Makes a group for each board: the board itself, then `num_aug` random images of it."""
    inputs, labels = augment(size, puzzles, answers, num_aug, seed)
    return plain_split(where, size + 2, inputs, labels, copies=1 + num_aug)


def augment(
    size: int, puzzles: np.ndarray, answers: np.ndarray, num_aug: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of every board, followed by `num_aug` images of it under random
    symmetries.
    """
    boards, cells = puzzles.shape
    copies = 1 + num_aug
    inputs, labels = np.empty((2, boards * copies, cells), np.uint8)
    per_chunk = max(1, CHUNK // copies)
    for chunk, first in enumerate(range(0, boards, per_chunk)):
        part = slice(first, first + per_chunk)
        answer = np.repeat(answers[part].astype(np.uint8), copies, axis=0)
        blank = np.repeat(puzzles[part] == 0, copies, axis=0)
        if num_aug:
            rng = np.random.default_rng([seed, chunk])
            original = np.arange(len(answer)) % copies == 0
            cell = cell_permutations(size, len(answer), rng)
            cell[original] = np.arange(cells)
            digit = digit_permutations(size, len(answer), rng)
            digit[original] = np.arange(size + 1)
            answer, blank = _transform(answer, blank, cell, digit)
        rows = slice(first * copies, first * copies + len(answer))
        labels[rows] = answer + 1
        inputs[rows] = np.where(blank, np.uint8(BLANK), labels[rows])
    return inputs, labels


def _transform(
    answer: np.ndarray, blank: np.ndarray, cell: np.ndarray, digit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows, cells = answer.shape
    # a cell's digit and its blankness travel together: one gather moves both
    both = (answer | blank.astype(np.uint8) << 5).reshape(-1)
    moved = both[cell + np.arange(0, rows * cells, cells, dtype=np.int32)[:, None]]
    width = digit.shape[1]
    answer = digit.reshape(-1)[
        (moved & 31) + np.arange(0, rows * width, width, dtype=np.int32)[:, None]
    ]
    return answer, moved > 31


def digit_permutations(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random relabellings (count, size + 1); 0 stays 0."""
    digits = np.tile(np.arange(size + 1, dtype=np.uint8), (count, 1))
    digits[:, 1:] = rng.permuted(digits[:, 1:], axis=1)
    return digits


def cell_permutations(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the source of each cell (count, cells): permutes bands and stacks, rows and columns
    within them, and transposes.
    """
    height, width = BOXES[size]
    row = _line_permutations(size // height, height, count, rng)[:, :, None]
    column = _line_permutations(size // width, width, count, rng)[:, None, :]
    source = row * np.int32(size) + column
    if height == width:  # only then does a transposed box keep its shape
        transposed = rng.random(count) < 0.5
        source[transposed] = (column * np.int32(size) + row)[transposed]
    return source.reshape(count, size * size)


def _line_permutations(blocks: int, lines: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random orders (count, blocks * lines) that keep the lines of a block together."""
    block = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), (count, 1)), axis=1)
    line = rng.permuted(np.tile(np.arange(lines, dtype=np.int32), (count * blocks, 1)), axis=1)
    return (block[:, :, None] * np.int32(lines) + line.reshape(count, blocks, lines)).reshape(
        count, blocks * lines
    )
