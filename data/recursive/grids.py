"""Grids of a task of one's own: read from JSON, and as tokens on a canvas.

Tokens are ARC's: symbol s is token s + 2. Where grids differ in shape, end tokens follow the last
row and the last column of each, and the rest is pad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NotRequired, TypeVar

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from data.files import parse_json
from data.recursive.arc import SIDE, images
from data.recursive.arc_tasks import rectangle
from utils.errors import ConfigError, brief

T = TypeVar("T")
GRIDS = "grids.json"  # the canvas of a dataset
MOST_SYMBOLS = 250  # with pad and end tokens, they fit a byte

Row = Annotated[
    list[Annotated[int, Field(ge=0, lt=MOST_SYMBOLS)]], Field(min_length=1, max_length=SIDE)
]
Grid = Annotated[list[Row], Field(min_length=1, max_length=SIDE), AfterValidator(rectangle)]


class Example(TypedDict):
    """A line of a file. Lines that name one puzzle are its pairs."""

    puzzle: NotRequired[str]
    input: Grid
    output: Grid


EXAMPLE = TypeAdapter(Example)


@dataclass(frozen=True)
class Canvas:
    """Where the grids of a dataset lie."""

    rows: int
    columns: int
    padded: bool  # whether grids differ in shape

    def images(self, grid: list[list[int]]) -> list[np.ndarray]:
        """Returns the tokens of a grid under every symmetry, each a row of this many cells."""
        laid = []
        for tokens in images(np.array(grid, np.uint8)):
            canvas = np.zeros((self.rows, self.columns), np.uint8)
            part = tokens[: self.rows, : self.columns]  # where there is no room for end tokens
            canvas[: part.shape[0], : part.shape[1]] = part
            laid.append(canvas.reshape(-1))
        return laid


def canvas_for(shapes: set[tuple[int, int]]) -> Canvas:
    """Returns the smallest canvas for grids of these shapes: a square, unless all are of one."""
    rows, columns = max(shapes)
    padded = len(shapes) > 1
    side = max(map(max, shapes))
    return Canvas(side, side, padded) if padded else Canvas(rows, columns, padded)


def parsed(where: str, text: bytes | str, kind: TypeAdapter[T]) -> T:
    """Reads a line. An error names it."""
    try:
        return parse_json(text, kind)
    except ValueError as error:
        raise ConfigError(f"{where}: {brief(error)}; correct or remove it") from None
