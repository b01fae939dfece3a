"""Boards and mazes as their owners write them: typed, drawn, listed a puzzle a line, or in a table.

What differs between editors and systems says nothing: blank lines, the ends of lines, spaces at
the end of a line, a byte order mark.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.recursive import maze
from data.recursive.sudoku import DIGITS, geometry
from data.recursive.sudoku_sets import BLANK
from data.recursive.tables import SEPARATORS, table_of
from utils.errors import ConfigError, brief, short
from utils.files import read_text as read_file

KEY = "data.puzzle"
STDIN = "-"
FRAME = re.compile("[-|+=\u2500-\u257f]")  # what separates boxes in drawings of boards
BLANKS = "._"
# what ends like the name of a file, or names a folder
PATH = re.compile(r"(?!\s*\{)[^\n]*([/\\][^\n]*|\.[A-Za-z][A-Za-z0-9]{0,5})")
CELLS = re.compile(r"[0-9A-Ga-g._\s#So]+")  # a board or a maze, whatever it ends like
TITLE = re.compile(r"\s*#.*|\s*[A-Za-z]{3,}\s+\d+\s*:?\s*")  # above a board: `Grid 01`


class Puzzle(NamedTuple):
    """One puzzle as text, and how messages name it."""

    where: str
    line: int  # where it begins, counted from 1
    text: str


def read_text(given: str) -> tuple[str, str]:
    """How messages name it, and what was typed, or is in the file of that name; `-` is the
    standard input.
    """
    where = f"{KEY}={short(given)}"
    if given == STDIN:
        text = sys.stdin.read()
        if not text.strip():
            raise ConfigError(
                f"{where}: the standard input is empty; pipe a puzzle into one process, or give a"
                " file"
            )
        return where, plain(text)
    try:
        if os.path.isdir(given):
            raise ConfigError(f"{where}: is a folder; give a file of text, or the puzzle itself")
        if os.path.exists(given):
            return where, plain(read_file(Path(given)))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{where}: cannot be read ({brief(error)}); give a file of text, or the puzzle itself"
        ) from None
    if PATH.fullmatch(given) and not CELLS.fullmatch(given):
        raise ConfigError(f"{where}: no such file; give a file of text, or the puzzle itself")
    return where, plain(given)


def plain(text: str) -> str:
    """The text without a byte order mark, every line ended by a newline alone."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def sudoku_puzzles(where: str, text: str, size: int) -> list[Puzzle]:
    """The boards of a text: one, drawn or in a line; one a line; drawn below each other; or the
    column of a table.
    """

    def cells(line: str) -> int:
        return len(sudoku_cells(line, size))

    if found := _column(where, text, lambda field: cells(field) == size * size):
        return found
    lines = [
        (number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if not TITLE.fullmatch(line) and cells(line)
    ]
    counts = {cells(line) for _, line in lines}
    if len(lines) > 1 and (size * size in counts or min(counts) > size):
        return [Puzzle(f"{where}: line {number}", number, line) for number, line in lines]
    if counts == {size} and len(lines) > size and len(lines) % size == 0:
        return _drawn_below(where, lines, size)
    return [Puzzle(where, 1, "\n".join(line for _, line in lines))]


def sudoku_cells(text: str, size: int) -> list[str]:
    """The characters of the cells; a blank is 0. Numbers may be written out on large boards, and
    empty fields of a table are blanks.
    """
    found: list[str] = []
    for line in text.split("\n"):
        fields = re.split(f"[{SEPARATORS}]", line.strip())
        if len(fields) > 1:
            words = [field.strip() or "." for field in fields]
        else:
            words = FRAME.sub(" ", line).split()
        if size > 9 and len(words) % size == 0:
            words = [_as_digit(word, size) for word in words]
        found += [
            "0" if character in BLANKS else character.upper()
            for character in "".join(words)
            if not (character.isspace() or FRAME.match(character))
        ]
    return found


def _as_digit(word: str, size: int) -> str:
    """A number of a large board by its digit; another word as it is."""
    return DIGITS[int(word)] if re.fullmatch("1[0-9]", word) and int(word) <= size else word


def sudoku_tokens(puzzle: Puzzle, size: int) -> np.ndarray:
    """A board, row by row; blanks are `.`, `_` or 0."""
    cells = sudoku_cells(puzzle.text, size)
    if unknown := [cell for cell in cells if cell not in DIGITS[: size + 1]]:
        raise ConfigError(
            f"{puzzle.where}: has {short(unknown[0])}; cells are 1 to {DIGITS[size]}, or . for a"
            " blank"
        )
    if len(cells) != size * size:
        raise ConfigError(
            f"{puzzle.where}: has {len(cells)} cells, not {size} × {size}; give all, with . for"
            " blanks"
        )
    if size > 9 and re.search(r"(?<!\d)0", puzzle.text) and set(BLANKS) & set(puzzle.text):
        raise ConfigError(
            f"{puzzle.where}: has both 0 and . or _; cells are 1 to {DIGITS[size]}, so write blanks"
            " in one way"
        )
    board = np.array([DIGITS.index(cell) for cell in cells])
    for number, unit in enumerate(geometry(size).units):
        digits = board[unit][board[unit] > 0]
        if len(twice := [digit for digit in digits if (digits == digit).sum() > 1]):
            name = f"{('row', 'column', 'box')[number // size]} {number % size + 1}"
            raise ConfigError(f"{puzzle.where}: has {DIGITS[twice[0]]} twice in {name}; correct it")
    return board + BLANK


def maze_puzzles(where: str, text: str, side: int) -> list[Puzzle]:
    """The mazes of a text: one, drawn or in a line; one a line; drawn below each other, with blank
    lines between; or the column of a table.
    """
    cells = side * side
    if found := _column(where, text, lambda field: len(field) == cells):
        return found
    lines = list(enumerate(text.removesuffix("\n").split("\n"), 1))
    drawn = [(number, line) for number, line in lines if line.strip()]
    if drawn and all(len(line) > side for _, line in drawn):
        several = len(drawn) > 1
        # editors remove spaces at the end of a line
        return [
            Puzzle(
                f"{where}: line {number}" if several else where,
                number,
                line if "." in line else line.ljust(cells),
            )
            for number, line in drawn
        ]
    if len(lines) != side and len(drawn) > side and len(drawn) % side == 0:
        return _drawn_below(where, drawn, side)
    # a row of free cells may have become a blank line: blank lines around the maze are no rows
    # only if there are too many
    rows = lines if len(lines) == side else list(enumerate(text.strip("\n").split("\n"), 1))
    return [Puzzle(where, 1, "\n".join(line for _, line in rows))]


def maze_tokens(puzzle: Puzzle, side: int) -> np.ndarray:
    """A maze, row by row, in one line or in many; `.` is a free cell as well as a space."""
    rows = puzzle.text.split("\n")
    if len(rows) == 1:
        if len(rows[0]) != side * side:
            raise ConfigError(
                f"{puzzle.where}: has {len(rows[0])} cells, not {side} × {side}; give all"
            )
        rows = [rows[0][start : start + side] for start in range(0, len(rows[0]), side)]
    if len(rows) != side or any(len(row) > side for row in rows):
        widths = max((len(row) for row in rows), default=0)
        raise ConfigError(
            f"{puzzle.where}: has {len(rows)} rows of {widths} cells, not {side} × {side}; give all"
        )
    characters = "".join(row.ljust(side) for row in rows).replace(".", " ")
    characters = characters.replace("s", "S").replace("g", "G")
    clues = maze.CHARACTERS[: maze.GOAL]
    if unknown := [character for character in characters if character not in clues]:
        raise ConfigError(
            f"{puzzle.where}: has {short(unknown[0])}; cells are # for a wall, a space or . for a"
            " way, S and G"
        )
    tokens = np.array([clues.index(character) + 1 for character in characters])
    for end, name in ((maze.START, "S"), (maze.GOAL, "G")):
        if (number := int((tokens == end).sum())) != 1:
            raise ConfigError(
                f"{puzzle.where}: has {number} {name}; a maze has one start S and one goal G"
            )
    return tokens


def _drawn_below(where: str, lines: list[tuple[int, str]], rows: int) -> list[Puzzle]:
    """Puzzles of this many lines each."""
    return [
        Puzzle(f"{where}: line {part[0][0]}", part[0][0], "\n".join(line for _, line in part))
        for part in (lines[start : start + rows] for start in range(0, len(lines), rows))
    ]


def _column(where: str, text: str, fits: Callable[[str], bool]) -> list[Puzzle]:
    """The questions of a table; none if the text is no table, such as a list without separators."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    table = table_of(first, fits)
    if table is None or len(lines) == 1 or (table.fields == 1 and not table.header):
        return []
    found = [
        Puzzle(f"{where}: line {number}", number, question)
        for number, question, _, _ in table.rows(where, lines)
    ]
    if not found:
        raise ConfigError(f"{where}: holds a header and no puzzles; add a line for each")
    return found
