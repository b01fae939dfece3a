"""From boards to puzzle sets: tokens, and the symmetries that turn one board into many."""

from __future__ import annotations

import numpy as np

from data.recursive.puzzle_files import Metadata, PuzzleSplit, plain_split
from data.recursive.sudoku import BOXES

PAD, BLANK = 0, 1  # digit d is token d + 1
CHUNK = 1 << 15  # boards transformed together: small enough for the cache


def metadata(size: int) -> Metadata:
    """How Sudoku boards are encoded: pad 0, blank 1, digit d as d + 1; one set, no puzzle
    identities.
    """
    return Metadata(
        pad_id=PAD, ignore_label_id=PAD, blank_identifier_id=0, vocab_size=size + 2,
        seq_len=size * size, num_puzzle_identifiers=1, sets=("all",),
    )  # fmt: skip


def sudoku_split(
    where: str, size: int, puzzles: np.ndarray, answers: np.ndarray, num_aug: int, seed: int
) -> PuzzleSplit:
    """One group per board: the board itself, then `num_aug` random images of it, one example
    each.
    """
    copies = 1 + num_aug
    inputs, labels = augment(size, puzzles, answers, num_aug, seed)
    return plain_split(where, metadata(size), inputs, labels, copies)


def augment(
    size: int, puzzles: np.ndarray, answers: np.ndarray, num_aug: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every board followed by `num_aug` images of it under random symmetries, as
    uint8.
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
    """Random relabellings (count, size + 1); 0 stays 0."""
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
    """Random orders (count, blocks * lines) that keep the lines of a block together."""
    block = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), (count, 1)), axis=1)
    line = rng.permuted(np.tile(np.arange(lines, dtype=np.int32), (count * blocks, 1)), axis=1)
    return (block[:, :, None] * np.int32(lines) + line.reshape(count, blocks, lines)).reshape(
        count, blocks * lines
    )
