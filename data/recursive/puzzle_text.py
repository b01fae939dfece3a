"""Puzzles in characters: their tokens, and a puzzle drawn beside a model's answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from contract import IGNORE
from data.recursive import grids
from data.recursive.arc import CELLS, VOCAB, grid_lines
from data.recursive.grids import Task
from data.recursive.maze import CHARACTERS, FREE, is_maze, leads
from data.recursive.sudoku import BLANK, BOXES, DIGITS

GAP = "    "
NOTHING = "?"  # a token that no cell may hold
NOT_COUNTED = "-"  # a cell without a label


def tokens_of(kind: str, texts: Sequence[str]) -> np.ndarray:
    """Returns the tokens of equally long puzzles, and 0 for other characters."""
    written = dict.fromkeys("._", BLANK) | {digit: BLANK + i for i, digit in enumerate(DIGITS)}
    written |= {digit.lower(): token for digit, token in written.items()}
    if kind == "maze":
        written = {".": FREE} | {character: i for i, character in enumerate(CHARACTERS, 1)}
    table = np.zeros(256, np.uint8)
    table[list(map(ord, written))] = list(written.values())
    # what is not ASCII becomes a question mark
    codes = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8)
    return table[codes.reshape(len(texts), -1)]


def characters(kind: str, tokens: np.ndarray) -> str:
    """Returns a character for each cell: `.` for a Sudoku's blank, a maze's own characters, the
    symbol in a grid of another task.
    """
    if kind == "maze":
        table = NOTHING + CHARACTERS
    elif kind == "grid":
        table = grids.CHARACTERS
    else:
        side = round(len(tokens) ** 0.5)
        table = NOTHING + "." + DIGITS[1 : side + 1]  # tokens 0 and 1 are PAD and BLANK
    return "".join(_character(table, token) for token in tokens.tolist())


def _character(table: str, token: int) -> str:
    if token == -1:
        return NOT_COUNTED
    return table[token] if 0 <= token < len(table) else NOTHING


def puzzle_text(
    inputs: np.ndarray,
    labels: np.ndarray,
    prediction: np.ndarray,
    vocab_size: int,
    task: Task | None = None,
) -> str:
    """Draws puzzle, answer and verdict, with wrong cells marked `x`. Puzzles of unknown kind have a
    verdict alone.
    """
    wrong = (labels != IGNORE) & (prediction != labels)
    # ARC's answers may have another shape than the label, so grids are drawn without marks
    if (len(inputs), vocab_size) == (CELLS, VOCAB) and not task:
        parts = {"puzzle": grid_lines(inputs), "answer": grid_lines(prediction)}
        if wrong.any():
            parts["right"] = grid_lines(labels)
        return "\n".join([*columns(parts), _verdict(labels, wrong, "")])
    kind = "grid" if task else kind_of(inputs[None], labels[None], vocab_size)
    # a maze may have several shortest paths, and its label is one of them
    verdict = _verdict(labels, wrong)
    if kind == "maze" and wrong.any() and leads(inputs[None], prediction[None])[0]:
        verdict = "another shortest path than the recorded one (where they differ: x)"
    lines = drawn(kind, inputs, prediction, wrong, task) if kind else []
    return "\n".join([*lines, verdict])


def kind_of(inputs: np.ndarray, labels: np.ndarray, vocab_size: int) -> str:
    """Guesses the kind of puzzle from its rows, because the files do not name it."""
    side = round(inputs.shape[1] ** 0.5)
    if is_maze(inputs, labels):
        return "maze"
    is_board = side in BOXES and side * side == inputs.shape[1] and vocab_size == side + 2
    return "sudoku" if is_board else ""


def drawn(
    kind: str,
    inputs: np.ndarray,
    prediction: np.ndarray,
    wrong: np.ndarray,
    task: Task | None = None,
) -> list[str]:
    """Draws a puzzle and the answer side by side, wrong cells marked `x`."""
    width = task.columns if task else round(len(inputs) ** 0.5)
    # an x replaces a cell of a maze, and follows other cells
    given = [*characters(kind, inputs)]
    answer = characters(kind, task.shown(prediction) if task else prediction)
    cells = [cell + ("x" if bad else " ") for cell, bad in zip(answer, wrong, strict=True)]
    if kind == "sudoku":
        return columns({"puzzle": _board(given, width), "answer": _board(cells, width)})
    if kind == "maze":
        cells = ["x" if bad else cell for cell, bad in zip(answer, wrong, strict=True)]
    else:
        given = [f"{cell} " for cell in given]
    starts = range(0, len(inputs), width)
    lines = columns(
        {
            name: ["".join(part[start : start + width]) for start in starts]
            for name, part in (("puzzle", given), ("answer", cells))
        }
    )
    return [line for line in lines if line] if task else lines  # without rows of padding


def columns(parts: dict[str, list[str]]) -> list[str]:
    """Puts named parts of any heights side by side."""
    widths = [max(map(len, (name, *lines))) for name, lines in parts.items()]
    rows = [tuple(parts), *zip_longest(*parts.values(), fillvalue="")]
    return [
        GAP.join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _board(cells: list[str], side: int) -> list[str]:
    height, width = BOXES[side]
    lines = []
    for row in range(side):
        boxes = [
            " ".join(cells[row * side + start : row * side + start + width])
            for start in range(0, side, width)
        ]
        if row and row % height == 0:
            lines.append("-+-".join("-" * len(box) for box in boxes))
        lines.append(" | ".join(boxes))
    return lines


def _verdict(labels: np.ndarray, wrong: np.ndarray, marks: str = " (marked x)") -> str:
    counted = int((labels != IGNORE).sum())
    return f"wrong: {int(wrong.sum())} of {counted} cells{marks}" if wrong.any() else "correct"
