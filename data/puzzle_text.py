"""A puzzle and a model's answer to it, in characters."""

from __future__ import annotations

import numpy as np

from data.source import IGNORE
from data.sudoku import BOXES, DIGITS
from data.sudoku_sets import BLANK

GAP = "    "
NOTHING = "?"  # in the place of an answer that can stand in no cell


def puzzle_text(inputs: np.ndarray, labels: np.ndarray, prediction: np.ndarray, vocab_size: int) -> str:
    """Puzzle, answer and verdict, wrong cells marked `x`; Sudoku boards as boards, other squares as grids, the rest as rows."""
    wrong = (labels != IGNORE) & (prediction != labels)
    side, width = round(len(inputs) ** 0.5), len(str(vocab_size - 1))
    if side * side != len(inputs):
        # a token per column, so that puzzle, answer and marks stand under each other
        marks = ["x" if bad else "" for bad in wrong]
        rows = [("puzzle", [str(token) for token in inputs]), ("answer", _shown(prediction, 0, vocab_size - 1)), ("", marks)]
        body = [(f"{name:7}" + " ".join(f"{cell:>{width + 1}}" for cell in row)).rstrip() for name, row in rows]
    elif side in BOXES and vocab_size == side + 2:
        puzzle = _board(["." if token <= BLANK else DIGITS[token - 1] for token in inputs], side)
        body = _beside(puzzle, _board(_marked(_digits(prediction - 1, side), wrong, 1), side))
    else:
        answer = _marked(_shown(prediction, 0, vocab_size - 1), wrong, width)
        body = _beside(_grid([f"{token:>{width}}" for token in inputs], side), _grid(answer, side))
    return "\n".join([*body, _verdict(labels, wrong)])


def _shown(values: np.ndarray, least: int, most: int) -> list[str]:
    """An untrained model answers with anything: a pad or a blank where a digit belongs."""
    return [str(value) if least <= value <= most else NOTHING for value in values]


def _digits(values: np.ndarray, side: int) -> list[str]:
    return [DIGITS[value] if 1 <= value <= side else NOTHING for value in values]


def _marked(values: list[str], wrong: np.ndarray, width: int) -> list[str]:
    """Every cell followed by its mark, so that all cells are equally wide."""
    return [f"{value:>{width}}" + ("x" if bad else " ") for value, bad in zip(values, wrong, strict=True)]


def _grid(cells: list[str], side: int) -> list[str]:
    return [" ".join(cells[start : start + side]) for start in range(0, side * side, side)]


def _board(cells: list[str], side: int) -> list[str]:
    height, width = BOXES[side]
    lines = []
    for row in range(side):
        boxes = [" ".join(cells[row * side + start : row * side + start + width]) for start in range(0, side, width)]
        if row and row % height == 0:
            lines.append("-+-".join("-" * len(box) for box in boxes))
        lines.append(" | ".join(boxes))
    return lines


def _beside(puzzle: list[str], answer: list[str]) -> list[str]:
    width = max(len("puzzle"), len(puzzle[0]))
    rows = [("puzzle", "answer"), *zip(puzzle, answer, strict=True)]
    return [f"{left:{width}}{GAP}{right}".rstrip() for left, right in rows]


def _verdict(labels: np.ndarray, wrong: np.ndarray) -> str:
    counted = int((labels != IGNORE).sum())
    return f"wrong: {int(wrong.sum())} of {counted} cells (marked x)" if wrong.any() else "correct"
