"""Images of an ARC task under symmetries, colour maps and translations, made together."""

# A augmentations, P pairs of a task, T symmetries

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.recursive.arc import CELLS, COLOURS, FIRST, SIDE, SWAPS, SYMMETRIES, VOCAB, images
from data.recursive.arc_tasks import Pair, Task
from utils.noise import generator

TRIES = 8  # draws for each augmentation that is wanted
ROWS_AT_ONCE = 2048  # rows made together: they stay in the cache
WIDE = SIDE + 1  # a canvas, and room for end tokens that do not fit one


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


def augmented(task: Task, num_aug: int, seed: int) -> Variants:
    """Draws different augmentations, as many as wanted unless too many draws repeat others."""
    rng = generator(seed, task.name)  # other tasks do not influence it
    imaged = [tuple(images(grid) for grid in pair) for pair in task.pairs]
    # all tokens of the task under each symmetry: equal ones are equal puzzles, as the end tokens of
    # a grid also tell its size
    contents = [
        np.concatenate([turned[turn].ravel() for pair in imaged for turned in pair])
        for turn in range(len(SYMMETRIES))
    ]
    # the symmetry and the colours of each augmentation; the first is the task itself
    found: dict[bytes, tuple[np.uint8, np.ndarray]] = {}
    symmetry = np.zeros(1 + TRIES * num_aug, np.uint8)
    colours = np.tile(np.arange(COLOURS, dtype=np.uint8), (len(symmetry), 1))
    symmetry[1:] = rng.integers(len(SYMMETRIES), size=TRIES * num_aug)
    colours[1:, 1:] = rng.permuted(colours[1:, 1:], axis=1)  # black stays
    # an augmentation counts only if no earlier one makes the same puzzle, by a hash of its tokens
    for turn, colour_map, table in zip(symmetry, colours, token_tables(colours), strict=True):
        found.setdefault(sha256(table[contents[turn]]).digest(), (turn, colour_map))
        if len(found) > num_aug:
            break
    symmetry, colours = (np.array(part) for part in zip(*found.values(), strict=True))
    return Variants(task, imaged, symmetry, colours, shifts(task.training_pairs, symmetry, rng))


def shifts(pairs: list[Pair], symmetry: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws how far down and right each pair moves (A, P, 2), input and answer together. One pair
    of each puzzle stays.
    """
    sizes = np.array([np.maximum(grid.shape, answer.shape) for grid, answer in pairs])
    # input and answer move together, so that both stay on the canvas
    room = SIDE + 1 - np.where(SWAPS[symmetry][:, None, None], sizes[:, ::-1], sizes)
    shift = (rng.random(room.shape) * room).astype(np.uint8)
    shift[np.arange(len(symmetry)), rng.integers(len(pairs), size=len(symmetry))] = 0
    return shift


def rows(group: Variants, side: int, training: bool) -> Iterator[np.ndarray]:
    """Yields the inputs or answers of all puzzles (…, 900) in pieces, puzzle after puzzle."""
    task = group.task
    pairs = slice(len(task.training_pairs)) if training else slice(len(task.shown), None)
    grids = [pair[side] for pair in group.images[pairs]]
    tables = token_tables(group.colours)
    # what is tested stays in its corner
    shift = group.shift if training else np.zeros((len(group), len(grids), 2), np.uint8)
    # puzzles with the same symmetry share their turned grids: each is looked up once, for all
    together = max(1, ROWS_AT_ONCE // len(grids))
    for first in range(0, len(group), together):
        symmetry = group.symmetry[first : first + together]
        canvas = np.zeros((len(symmetry), len(grids), WIDE, WIDE), np.uint8)
        for turn in range(len(SYMMETRIES)):
            puzzle = np.flatnonzero(symmetry == turn)
            mapped = tables[first + puzzle]
            for number, turned in enumerate(grids):
                height, width = turned[turn].shape
                # all places where such a grid may lie: writing to them at once takes half as long
                # as cell by cell
                places = sliding_window_view(
                    canvas[:, number], (height, width), axis=(1, 2), writeable=True
                )
                down, right = shift[first + puzzle, number].T
                places[puzzle, down, right] = mapped.take(turned[turn], axis=1)
        yield canvas[..., :SIDE, :SIDE].reshape(-1, CELLS)


def token_tables(colours: np.ndarray) -> np.ndarray:
    """Returns the token that each token becomes (A, 12) under colour maps (A, 10)."""
    tables = np.tile(np.arange(VOCAB, dtype=np.uint8), (len(colours), 1))
    tables[:, FIRST:] = colours + FIRST
    return tables
