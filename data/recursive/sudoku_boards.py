"""Generates Sudoku puzzles with a unique solution, and images of boards under the symmetries of
Sudoku; all arrays of boards as in `sudoku.py`.
"""

from __future__ import annotations

from math import comb

import numpy as np

from data.recursive.puzzle_files import PuzzleSplit, plain_split
from data.recursive.sudoku import BLANK, BOXES, geometry, propagate, search, to_digits, to_masks
from utils.errors import ConfigError

SOLVED = {4: 288, 6: 28_200_960}  # different solved boards
MOST = 10**7  # boards of one dataset, before augmentation
ROUNDS = 30  # attempts to find enough boards before giving up
SPOILINGS = 300  # clues that are tried to leave a board without a solution
SPARE = 3  # solved boards for each puzzle that has to be hard: most puzzles of size 9 are not
TRIES = 256  # at least this many of them are tried together
# guesses at which a large board counts as one of several solutions; one of size 9 never needs as
# many
TOO_DEEP = 500
CHUNK = 1 << 15  # boards transformed together: small enough for the cache


def random_solutions(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws solved boards, possibly with repeats, by random guesses. Dead ends start afresh."""
    geo = geometry(size)
    found: list[np.ndarray] = []
    missing = count
    masks = np.full((geo.cells, count), geo.full)
    while missing > 0:
        # a cell with the fewest candidates, any of several, and any of its candidates
        candidates = np.bitwise_count(masks)
        broken_ties = candidates + rng.random(masks.shape, np.float32) / 2
        cell = np.where(candidates > 1, broken_ties, 99).argmin(axis=0)
        board = np.arange(masks.shape[1])
        # random numbers for the candidates, the largest of which wins
        bits = masks[cell, board] >> np.arange(size, dtype=np.uint16)[:, None] & 1
        digit = (bits * (1 + rng.random(bits.shape))).argmax(axis=0)
        masks[cell, board] = np.uint16(1) << digit.astype(np.uint16)
        possible = propagate(masks, geo)
        masks[:, ~possible] = geo.full  # a dead end
        # solved boards leave, the others guess again
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
    # each board in another order of cells
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
    most = min(SOLVED.get(size, MOST) * comb(size * size, blanks), MOST)
    if sum(counts) > most:
        raise ConfigError(
            f"train={counts[0]} test={counts[1]}: at most {most:,} different {size}x{size} puzzles"
            f" with blanks={blanks} can be made; ask for fewer"
        )
    rng = np.random.default_rng([seed, size, blanks])
    solved = _distinct_solutions(size, sum(counts) * (SPARE if min_guesses else 1), rng)
    # each part has its own solved boards, as many as it needs puzzles, and one at least
    ends = np.cumsum(counts)[:-1] * len(solved) // sum(counts)
    pools = np.split(solved, np.clip(ends, 1, len(solved) - 1))
    return [
        _puzzles(pool, count, size, blanks, min_guesses, rng)
        for pool, count in zip(pools, counts, strict=True)
    ]


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
        # as many as are still missing, but enough at once to keep the solver busy
        tried = count - len(puzzles)
        if min_guesses:
            tried = max(tried, TRIES)
        chosen = pool[(used + np.arange(tried)) % len(pool)]
        used += tried
        dug, good = dig(chosen, size, blanks, rng)
        # of the puzzles that could be dug, keep those that are hard
        if min_guesses:
            guesses = search(to_masks(dug[good], size), size, limit=2).guesses
            good[good] = guesses >= min_guesses
        # small boards repeat: only the first of equal puzzles is kept
        puzzles = np.concatenate([puzzles, dug[good]])
        answers = np.concatenate([answers, chosen[good]])
        first = _first_occurrences(puzzles)[:count]
        puzzles, answers = puzzles[first], answers[first]
        if len(puzzles) == count:
            return puzzles, answers
    asked, less = f"blanks={blanks}", "blanks"
    if min_guesses:
        asked, less = f"{asked} min_guesses={min_guesses}", "guesses, more blanks"
    raise ConfigError(
        f"{asked}: only {len(puzzles)} of {count} different {size}x{size} puzzles found; ask for"
        f" fewer {less} or fewer boards"
    )


def spoil(
    puzzles: np.ndarray, answers: np.ndarray, size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boards with one clue changed so that no unit has a digit twice, and yet there is
    no solution; and their answers with that clue. A solver that guesses should accept none. Boards
    that no such clue is found for are left out.
    """
    rng = np.random.default_rng([seed, size])
    puzzles, answers = puzzles.copy(), answers.copy()
    left = np.arange(len(puzzles))
    for _ in range(SPOILINGS):
        if not len(left):
            break
        spoiled = puzzles[left]
        cell = np.where(spoiled > 0, rng.random(spoiled.shape), -1).argmax(axis=1)
        board = np.arange(len(left))
        spoiled[board, cell] = rng.integers(1, size + 1, len(left))
        bits = np.where(spoiled > 0, 1 << spoiled.astype(np.int64), 0)[:, geometry(size).units]
        # powers of two: their sum is their union if none occurs twice
        plain = (bits.sum(axis=2) == np.bitwise_or.reduce(bits, axis=2)).all(axis=1)
        done = plain & (search(to_masks(spoiled, size), size, limit=1).counts == 0)
        puzzles[left[done]] = spoiled[done]
        answers[left[done], cell[done]] = spoiled[board, cell][done]
        left = left[~done]
    if len(left) == len(puzzles):
        raise ConfigError(
            "--impossible: whichever clue is changed, the test boards have a solution; give boards"
            " with more clues"
        )
    return np.delete(puzzles, left, axis=0), np.delete(answers, left, axis=0)


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
        # the same symmetry for puzzle and answer; the first copy of each board stays as it is
        if num_aug:
            rng = np.random.default_rng([seed, chunk])
            original = np.arange(len(answer)) % copies == 0
            cell = cell_permutations(size, len(answer), rng)
            cell[original] = np.arange(cells)
            digit = digit_permutations(size, len(answer), rng)
            digit[original] = np.arange(size + 1)
            # a cell's digit, and whether it is blank, move together in one byte
            moved = np.take_along_axis(answer | blank.astype(np.uint8) << 5, cell, 1)
            answer, blank = np.take_along_axis(digit, moved & 31, 1), moved > 31
        rows = slice(first * copies, first * copies + len(answer))
        labels[rows] = answer + BLANK
        inputs[rows] = np.where(blank, np.uint8(BLANK), labels[rows])
    return inputs, labels


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
    orders = block[:, :, None] * np.int32(lines) + line.reshape(count, blocks, lines)
    return orders.reshape(count, blocks * lines)
