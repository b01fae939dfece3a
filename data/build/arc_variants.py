"""Images of an ARC task under symmetries, colour maps and translations, made together."""

# A augmentations, P pairs of a task, T symmetries

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from data.recursive.arc import CELLS, COLOURS, END, FIRST, SIDE, SWAPS, SYMMETRIES, VOCAB
from data.recursive.arc_tasks import Pair, Task

TOGETHER = 2048  # rows made together: they stay in the cache
WIDE = SIDE + 1  # a canvas, and room for end tokens that do not fit one
_RANDOM = np.random.default_rng(30)  # what contents are hashed by
# sums of so many are exact
CELL_HASH = _RANDOM.integers(2**32, size=(2, 2, WIDE, WIDE)).astype(np.float64)
COLOUR_HASH = _RANDOM.integers(2**63, size=(2, COLOURS), dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Variants:
    """The puzzles made of one task: first itself, then its augmentations."""

    task: Task
    # of each pair's grids, pairs that show the task first
    images: list[tuple[list[np.ndarray], ...]]
    symmetry: np.ndarray  # (A)
    colours: np.ndarray  # (A, 10)
    shift: np.ndarray  # (A, P, 2) of training pairs

    def __len__(self) -> int:
        return len(self.symmetry)


def generator(seed: int, name: str) -> np.random.Generator:
    """Returns a task's own generator, which other tasks do not influence."""
    return np.random.default_rng(
        [seed, int.from_bytes(sha256(name.encode()).digest()[:8], "little")]
    )


def variants(task: Task, num_aug: int, seed: int) -> Variants:
    """Draws different augmentations, as many as wanted or as exist."""
    rng = generator(seed, task.name)
    imaged = [tuple(images(grid) for grid in pair) for pair in task.pairs]
    sums = hash_sums(imaged)
    used = np.flatnonzero(sums[0, 0].any(0)[1:]) + 1
    there_are = len(SYMMETRIES) * math.perm(COLOURS - 1, len(used))
    drawn = 4 * (num_aug + 1)
    while True:
        draw = np.random.default_rng(rng.integers(2**63)).choice(
            there_are, min(drawn, there_are), replace=False
        )
        symmetry, colours = draw % len(SYMMETRIES), colour_maps(draw // len(SYMMETRIES), used)
        symmetry = np.concatenate([[0], symmetry]).astype(np.uint8)
        colours = np.concatenate([np.arange(COLOURS, dtype=np.uint8)[None], colours])
        kept = np.sort(np.unique(content_keys(sums, symmetry, colours), return_index=True)[1])[
            : num_aug + 1
        ]
        if len(kept) > num_aug or drawn >= there_are:
            break
        drawn *= 8
    symmetry, colours = symmetry[kept], colours[kept]
    return Variants(task, imaged, symmetry, colours, shifts(task.training_pairs, symmetry, rng))


def colour_maps(numbers: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the colour map (10) of each number: 0 stays 0, colours in use go to any others, the
    rest to what is left.
    """
    left = np.tile(np.arange(1, COLOURS, dtype=np.uint8), (len(numbers), 1))
    maps = np.zeros((len(numbers), COLOURS), np.uint8)
    row = np.arange(len(numbers))
    for colour in used:
        numbers, column = np.divmod(numbers, left.shape[1])
        maps[:, colour] = left[row, column]
        left = left[np.arange(left.shape[1]) != column[:, None]].reshape(
            len(row), left.shape[1] - 1
        )
    maps[:, np.setdiff1d(np.arange(1, COLOURS), used)] = left
    return maps


def images(grid: np.ndarray) -> list[np.ndarray]:
    """Returns the tokens of a grid under every symmetry, with end tokens."""
    turned = []
    for swap, row_back, column_back in SYMMETRIES:
        image = grid[:: -1 if row_back else 1, :: -1 if column_back else 1]
        image = image.T if swap else image
        tokens = np.zeros((image.shape[0] + 1, image.shape[1] + 1), np.uint8)
        tokens[:-1, :-1] = image
        tokens[:-1, :-1] += FIRST
        tokens[-1, :-1] = tokens[:-1, -1] = END
        turned.append(tokens)
    return turned


def hash_sums(imaged: list[tuple[list[np.ndarray], ...]]) -> np.ndarray:
    """Returns the sums over every pair's cells of each colour, under each symmetry (2, T, P, 10). A
    content's key is linear in them.
    """
    tokens, weights, sizes = [], [], []
    for pair in imaged:
        for side, turned in enumerate(pair):
            for image in turned:
                height, width = image.shape
                tokens.append(image.ravel())
                weights.append(CELL_HASH[:, side, :height, :width].reshape(2, -1))
                sizes.append(image.size)
    turns, pairs = len(SYMMETRIES), len(imaged)
    first = np.tile(np.arange(turns) * pairs, 2) + np.arange(pairs)[:, None]
    bins = np.repeat(first.ravel() * VOCAB, sizes) + np.concatenate(tokens)
    each = [np.bincount(bins, by, turns * pairs * VOCAB) for by in np.concatenate(weights, 1)]
    return np.stack(each).reshape(2, turns, pairs, VOCAB)[..., FIRST:].astype(np.uint64)


def content_keys(sums: np.ndarray, symmetry: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Returns a 64-bit key for each augmentation (A). Equal contents have equal keys, in any order
    of their pairs.
    """
    keys = sum(
        np.einsum("apc,ac->ap", one[symmetry], by[colours])
        for one, by in zip(sums, COLOUR_HASH, strict=True)
    )
    assert isinstance(keys, np.ndarray)
    keys = (keys ^ (keys >> np.uint64(31))) * MIX
    return (keys ^ (keys >> np.uint64(29))).sum(1)


def shifts(pairs: list[Pair], symmetry: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws how far down and right each pair moves (A, P, 2), input and answer together. One pair
    of each puzzle stays.
    """
    sizes = np.array([np.maximum(given.shape, answer.shape) for given, answer in pairs])
    room = SIDE + 1 - np.where(SWAPS[symmetry][:, None, None], sizes[:, ::-1], sizes)
    shift = (rng.random(room.shape) * room).astype(np.uint8)
    shift[np.arange(len(symmetry)), rng.integers(len(pairs), size=len(symmetry))] = 0
    return shift


def rows(made: Variants, side: int, training: bool) -> Iterator[np.ndarray]:
    """Yields the inputs or answers of all puzzles (…, 900) in pieces, puzzle after puzzle."""
    shown = len(made.task.shown)
    part = slice(0, len(made.task.training_pairs)) if training else slice(shown, None)
    grids = [pair[side] for pair in made.images[part]]
    tables = np.tile(np.arange(VOCAB, dtype=np.uint8), (len(made), 1))
    tables[:, FIRST:] = made.colours + FIRST
    together = max(1, TOGETHER // len(grids))
    for first in range(0, len(made), together):
        symmetry, table = made.symmetry[first : first + together], tables[first : first + together]
        canvas = np.zeros((len(symmetry), len(grids), WIDE, WIDE), np.uint8)
        for turn in range(len(SYMMETRIES)):
            puzzle = np.flatnonzero(symmetry == turn)
            mapped = table[puzzle]
            for number, grid in enumerate(grids if len(puzzle) else ()):
                height, width = grid[turn].shape
                # all places where such a grid may lie: writing to them at once is many times faster
                # than cell by cell
                room, strides = (WIDE - height + 1, WIDE - width + 1), canvas.strides
                places = np.ndarray(
                    (len(symmetry), *room, height, width),
                    np.uint8,
                    canvas,
                    number * strides[1],
                    (strides[0], *strides[2:], *strides[2:]),
                )
                down, right = made.shift[first + puzzle, number].T if training else (0, 0)
                places[puzzle, down, right] = mapped.take(grid[turn].ravel(), axis=1).reshape(
                    -1, height, width
                )
        yield canvas[..., :SIDE, :SIDE].reshape(-1, CELLS)
