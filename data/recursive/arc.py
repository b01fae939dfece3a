"""ARC grids as tokens, their symmetries, and the names of augmentations.

A grid is on a 30×30 canvas: colour c is token c + 2, end tokens follow its last row and its last
column, the rest is pad.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from utils.errors import ConfigError, brief
from utils.files import read_json

# N grids, T symmetries

SIDE, COLOURS = 30, 10
CELLS = SIDE * SIDE
PAD, END, FIRST = 0, 1, 2  # tokens: nothing, the end of a row or a column, the first colour
VOCAB = FIRST + COLOURS
BLANK = "<blank>"
# For each symmetry, by its published number: cell (i, j) of an image comes from (j, i) first if
# swapped; then the row is counted from the other end, then the column. 0 is the identity, 1 to 3
# turn counterclockwise, 4 and 5 mirror, 6 and 7 transpose.
SYMMETRIES = (
    (0, 0, 0),
    (1, 0, 1),
    (0, 1, 1),
    (1, 1, 0),
    (0, 0, 1),
    (0, 1, 0),
    (1, 0, 0),
    (1, 1, 1),
)
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)
SWAPS = np.array([swap for swap, _, _ in SYMMETRIES], bool)
# names of augmentations, as TRM's and HRM's builders write them: the puzzle, the symmetry, and the
# digit for each colour
NAMES = (
    re.compile(r"(.+)\|\|\|t([0-7])\|\|\|(\d{10})"),
    re.compile(r"(.+)_t([0-7])_(\d{10})"),
)
IDENTIFIERS = "identifiers.json"
NAMES_BY_ID = TypeAdapter(list[str])


def images(grid: np.ndarray) -> list[np.ndarray]:
    """Returns the tokens of a grid under every symmetry, with end tokens."""
    turned = []
    for swap, row_back, column_back in SYMMETRIES:
        # mirrored first, then transposed, so that a turn is one of each
        image = grid[:: -1 if row_back else 1, :: -1 if column_back else 1]
        image = image.T if swap else image
        tokens = np.zeros((image.shape[0] + 1, image.shape[1] + 1), np.uint8)
        tokens[:-1, :-1] = image
        tokens[:-1, :-1] += FIRST
        tokens[-1, :-1] = tokens[:-1, -1] = END
        turned.append(tokens)
    return turned


def origins(
    symmetry: np.ndarray, height: np.ndarray, width: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the row and column of the grid that each canvas cell of N images shows (N, 30, 30),
    and the images' heights and widths. Cells beyond an image have no meaning.
    """
    # the same rule as in `images`, but for each cell of many grids at once
    swap, row_back, column_back = np.array(SYMMETRIES, bool)[symmetry].T[:, :, None, None]
    i, j = np.arange(SIDE)[:, None], np.arange(SIDE)
    tall, wide = height[:, None, None], width[:, None, None]
    row, column = np.where(swap, j, i), np.where(swap, i, j)
    row = np.where(row_back, tall - 1 - row, row)
    column = np.where(column_back, wide - 1 - column, column)
    swapped = SWAPS[symmetry]
    return row, column, np.where(swapped, width, height), np.where(swapped, height, width)


def sizes(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the height and width (N) of the largest rectangle of colours in the corner of each
    canvas, the lowest of equal ones.
    """
    canvas = tokens.reshape(-1, SIDE, SIDE)
    colours = (canvas >= FIRST) & (canvas < VOCAB)
    # how wide the rectangle down to each row may be: as the shortest run of colours in these rows
    runs = np.minimum.accumulate(np.logical_and.accumulate(colours, axis=2).sum(2), axis=1)
    areas = runs * np.arange(1, SIDE + 1)
    rows = areas.argmax(1)
    found = areas.any(1)
    return np.where(found, rows + 1, 0), np.where(found, runs[np.arange(len(rows)), rows], 0)


def grid_lines(tokens: np.ndarray) -> list[str]:
    """Returns the grid on a canvas as text, a digit for each colour."""
    height, width = (int(side[0]) for side in sizes(tokens[None]))
    rows = tokens.reshape(SIDE, SIDE)[:height, :width].astype(int) - FIRST
    return ["".join(map(str, row)) for row in rows.tolist()]


def undone(
    tokens: np.ndarray, symmetry: np.ndarray, colours: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Undoes symmetries and colour maps (N, 10) of the grids on canvases (N, 900). Returns their
    tokens, heights and widths.
    """
    height, width = sizes(tokens)
    row, column, tall, wide = origins(np.array(INVERSE)[symmetry], height, width)
    lines = np.arange(SIDE)
    inside = (lines[:, None] < tall[:, None, None]) & (lines < wide[:, None, None])
    # first every cell from where it was, then every colour as it was
    cells = np.where(inside, row * SIDE + column, 0).reshape(len(tokens), CELLS)
    moved = np.take_along_axis(tokens, cells, 1).astype(np.int64)
    back = np.zeros((len(tokens), 1 << 8), np.uint8)  # the token that each token was
    colour_tokens = np.arange(FIRST, VOCAB, dtype=np.uint8)[None]
    np.put_along_axis(back, colours.astype(np.int64) + FIRST, colour_tokens, 1)
    undone = np.take_along_axis(back, moved, 1)
    return np.where(inside.reshape(len(tokens), CELLS), undone, np.uint8(PAD)), tall, wide


@dataclass(frozen=True)
class Augmentations:
    """The puzzle, symmetry and colour map of some puzzle ids."""

    names: list[str]  # of the puzzles, in the order of their ids
    puzzle: np.ndarray  # into names, by id
    symmetry: np.ndarray
    colours: np.ndarray  # (ids, 10)
    original: np.ndarray  # whether an id is that of the original puzzle


def read_augmentations(key: str, folder: Path, ids: np.ndarray) -> Augmentations:
    """Reads the augmentations of these ids from the names that either published builder writes."""
    where = f"{key}: {IDENTIFIERS}"
    remedy = "build the dataset again with python -m data.build.arc"
    name_of = read_json(folder / IDENTIFIERS, NAMES_BY_ID, remedy, where)
    if len(name_of) <= ids.max(initial=0):
        raise ConfigError(f"{where} names no puzzle {ids.max(initial=0)}; build the dataset again")
    names = [name_of[number] for number in ids]
    # the form that any of the names has; without one, all puzzles are as they were
    pattern = next((form for form in NAMES if any(map(form.fullmatch, names))), None)

    puzzles: dict[str, int] = {}
    puzzle, symmetry = np.empty(len(ids), np.int32), np.zeros(len(ids), np.uint8)
    colours = np.tile(np.arange(COLOURS, dtype=np.uint8), (len(ids), 1))
    original = np.ones(len(ids), bool)
    # names that do not have the form are puzzles as they were
    for index, name in enumerate(names):
        plain = name
        if match := pattern.fullmatch(name) if pattern else None:
            plain = match[1]
            symmetry[index], original[index] = int(match[2]), False
            colours[index] = [*map(int, match[3])]
        puzzle[index] = puzzles.setdefault(plain, len(puzzles))
    wrong = (np.sort(colours, 1) != np.arange(COLOURS)).any(1)
    if wrong.any():
        raise ConfigError(
            f"{where}: {brief(names[wrong.argmax()])} does not map ten colours to ten; build the"
            " dataset again"
        )
    return Augmentations([*puzzles], puzzle, symmetry, colours, original)
