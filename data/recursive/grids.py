"""Grids of a user's own task: read from JSON, as tokens, and as characters.

Tokens are ARC's: symbol s is token s + 2. Where grids differ in shape, end tokens follow the last
row and the last column of each, and the rest is pad.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Annotated, NotRequired, TypeVar

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from data.recursive.arc import BLANK, END, FIRST, PAD, SIDE, images
from data.recursive.arc_tasks import rectangle
from data.recursive.puzzle_files import DAMAGED, PuzzleSplit
from utils.errors import ConfigError, brief
from utils.files import parse_json, read_json

T = TypeVar("T")
GRIDS = "grids.json"  # what a dataset says of its grids
MOST_SYMBOLS = 250  # with pad and end tokens, they fit a byte
# a character for each symbol, the last 188 from Latin Extended
SYMBOLS = digits + ascii_uppercase + ascii_lowercase + "".join(map(chr, range(0x100, 0x1BC)))
CHARACTERS = " " * FIRST + SYMBOLS  # by token

Row = Annotated[
    list[Annotated[int, Field(ge=0, lt=MOST_SYMBOLS)]], Field(min_length=1, max_length=SIDE)
]
Grid = Annotated[list[Row], Field(min_length=1, max_length=SIDE), AfterValidator(rectangle)]


class Question(TypedDict):
    """A grid, perhaps with its answer. Lines that name one puzzle are pairs of it."""

    puzzle: NotRequired[str]
    input: Grid
    output: NotRequired[Grid]


class Example(TypedDict):
    """A line of a file to train or to evaluate on."""

    puzzle: NotRequired[str]
    input: Grid
    output: Grid


EXAMPLE, QUESTION = TypeAdapter(Example), TypeAdapter(Question)


@dataclass(frozen=True)
class Task:
    """The shape and the symbols of all grids of a dataset."""

    rows: int
    columns: int
    padded: bool  # whether grids may be smaller
    symbols: int
    ids: dict[str, int]  # of puzzles, by their names

    def images(self, grid: list[list[int]]) -> list[np.ndarray]:
        """Returns the tokens of a grid under every symmetry; the first is the grid itself."""
        laid = []
        for tokens in images(np.array(grid, np.uint8)):
            canvas = np.zeros((self.rows, self.columns), np.uint8)
            part = tokens[: self.rows, : self.columns]  # there may be no room for end tokens
            canvas[: part.shape[0], : part.shape[1]] = part
            laid.append(canvas.reshape(-1))
        return laid

    def shown(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens without what comes after end tokens."""
        ends = tokens.reshape(self.rows, self.columns) == END
        after = np.logical_or.accumulate(np.logical_or.accumulate(ends, 0), 1)
        return np.where(after.reshape(-1), PAD, tokens)

    def cells(self, tokens: np.ndarray, symbols: Sequence[str]) -> list[list[str]]:
        """Returns the rows of a grid with these symbols, without padding."""
        canvas = self.shown(tokens).reshape(self.rows, self.columns)
        rows = ([symbols[token - FIRST] for token in row if token >= FIRST] for row in canvas)
        return [row for row in rows if row]

    def text(self, tokens: np.ndarray) -> str:
        """Returns the rows of a grid with a space between them."""
        return " ".join(map("".join, self.cells(tokens, SYMBOLS)))

    def question(self, where: str, text: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Reads a grid from JSON, or from rows of characters with spaces between them. Returns its
        tokens, those of the answer, or else pad, and the id of its puzzle.
        """
        # a grid typed on the command line becomes the same JSON
        if not text.startswith("{"):
            if not {*text} <= {*SYMBOLS, " "}:
                raise ConfigError(
                    f"{where} is not a grid; write 0-9, A-Z and a-z with a space after each row, or"
                    " give a file of JSON lines"
                )
            text = json.dumps({"input": [[*map(SYMBOLS.index, row)] for row in text.split()]})
        given = parsed(where, text, QUESTION)
        grids = [given["input"], given.get("output", given["input"])]
        # a shape or a symbol that training did not have would mean nothing to the net
        for grid in grids:
            rows, columns, largest = len(grid), len(grid[0]), max(map(max, grid))
            smaller = rows <= self.rows and columns <= self.columns
            same = (rows, columns) == (self.rows, self.columns)
            if largest >= self.symbols or not (same or (smaller and self.padded)):
                most = "at most " if self.padded else ""
                raise ConfigError(
                    f"{where} has {rows}x{columns} cells and symbol {largest}; give what training"
                    f" had: {most}{self.rows}x{self.columns}, symbols 0 to {self.symbols - 1}"
                )
        # the id chooses the embedding that the net has learned for this puzzle
        name = given.get("puzzle", BLANK)
        if name not in self.ids:
            raise ConfigError(
                f"{where}: puzzle={brief(name)} is not in the training data; name one that is"
            )
        tokens, answer = (self.images(grid)[0] for grid in grids)
        return tokens, answer if "output" in given else np.zeros_like(answer), self.ids[name]


TASK = TypeAdapter(Task)


def task_for(shapes: set[tuple[int, int]], symbols: int, ids: dict[str, int]) -> Task:
    """Describes grids of these shapes. They are padded to a square, unless all are of one shape."""
    rows, columns = max(shapes)
    side = max(map(max, shapes))
    padded = len(shapes) > 1
    return Task(*((side, side) if padded else (rows, columns)), padded, symbols, ids)


def task_of(split: PuzzleSplit) -> Task | None:
    """Returns what a dataset says of its grids, or None for one of other puzzles."""
    if split.folder is None or not (split.folder / GRIDS).exists():
        return None
    task, about = read_json(split.folder / GRIDS, TASK, DAMAGED), split.metadata
    sizes = task.rows * task.columns, task.symbols + FIRST
    beyond = [*task.ids.values(), about.num_puzzle_identifiers - 1]
    if sizes != (about.seq_len, about.vocab_size) or min(beyond) < 0 or max(beyond) > beyond[-1]:
        raise ConfigError("does not fit dataset.json", value=split.folder / GRIDS, remedy=DAMAGED)
    return task


def parsed(where: str, text: bytes | str, kind: TypeAdapter[T]) -> T:
    """Reads a line of JSON. An error names it."""
    try:
        return parse_json(text, kind)
    except ValueError as error:
        raise ConfigError(f"{where}: {brief(error)}; correct or remove it") from None
