"""A puzzle that the user has typed or written into a file, and a model's answer to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.recursive import maze
from data.recursive.boards import OUTPUTS, boards_scene
from data.recursive.puzzle_text import drawn
from data.recursive.sudoku import DIGITS, geometry, is_solved
from data.recursive.sudoku_sets import BLANK
from data.source import IGNORE, Batch, OneExample
from utils.errors import ConfigError, brief, short
from utils.files import read_text as read_file
from utils.measure.report import Prediction, Report
from utils.measure.scene import Files

KEY = "data.puzzle"
FRAME = "|-+"  # what separates boxes in drawings of boards


def read_text(given: str) -> tuple[str, str]:
    """How messages name it, and what was typed or is in the file of that name."""
    where = f"{KEY}={short(given)}"
    try:
        is_file = os.path.exists(given) and not os.path.isdir(given)
        return where, read_file(Path(given)) if is_file else given
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot be read ({brief(error)}); give a file of text, or the puzzle itself"
        ) from None


def sudoku_tokens(where: str, text: str, size: int) -> np.ndarray:
    """A board, row by row; blanks are `.`, `_` or 0, and spaces, lines and frames say nothing."""
    cells = [
        "0" if character in "._" else character.upper()
        for character in text
        if not (character.isspace() or character in FRAME)
    ]
    if unknown := [cell for cell in cells if cell not in DIGITS[: size + 1]]:
        raise ConfigError(
            f"{where}: has {short(unknown[0])}; cells are 1 to {DIGITS[size]}, or . for a blank"
        )
    if len(cells) != size * size:
        raise ConfigError(
            f"{where}: has {len(cells)} cells, not {size} × {size}; give all, with . for blanks"
        )
    board = np.array([DIGITS.index(cell) for cell in cells])
    geo = geometry(size)
    for number, unit in enumerate(geo.units):
        digits = board[unit][board[unit] > 0]
        if len(twice := [digit for digit in digits if (digits == digit).sum() > 1]):
            name = f"{('row', 'column', 'box')[number // size]} {number % size + 1}"
            raise ConfigError(f"{where}: has {DIGITS[twice[0]]} twice in {name}; correct it")
    return board + BLANK


def sudoku_verdict(inputs: np.ndarray, answer: np.ndarray) -> tuple[np.ndarray, str]:
    """Cells that are wrong whatever the solution is, and what is to be said of the whole."""
    size = round(len(inputs) ** 0.5)
    geo, board = geometry(size), answer.astype(np.int64) - BLANK
    changed = (inputs > BLANK) & (answer != inputs)
    wrong = changed | (board < 1) | (board > size)
    for unit in geo.units:
        wrong[unit] |= (board[unit][:, None] == board[unit]).sum(1) > 1
    if is_solved(board[None], size)[0] and not changed.any():
        return wrong, "keeps the clues and the rules"
    return (
        wrong,
        (
            f"wrong: {int(changed.sum())} clues changed, {int(wrong.sum())} cells against the rules"
            " (marked x)"
        ),
    )


def maze_tokens(where: str, text: str, side: int) -> np.ndarray:
    """A maze, row by row, in one line or in many; `.` is a free cell as well as a space."""
    rows = text.strip("\n").split("\n")
    if len(rows) == 1:
        rows = [rows[0][start : start + side] for start in range(0, len(rows[0]), side)]
    if len(rows) != side or any(len(row) > side for row in rows):
        raise ConfigError(
            f"{where}: has {len(rows)} rows of {max(map(len, rows))} cells, not {side} × {side};"
            " give all"
        )
    # editors remove spaces at the end of a line
    characters = "".join(row.ljust(side) for row in rows)
    clues = maze.CHARACTERS[: maze.GOAL]
    if unknown := [
        character for character in characters.replace(".", " ") if character not in clues
    ]:
        raise ConfigError(
            f"{where}: has {short(unknown[0])}; cells are # for a wall, a space or . for a way, S"
            " and G"
        )
    tokens = np.array([clues.index(character) + 1 for character in characters.replace(".", " ")])
    for end, name in ((maze.START, "S"), (maze.GOAL, "G")):
        if (number := int((tokens == end).sum())) != 1:
            raise ConfigError(
                f"{where}: has {number} {name}; a maze has one start S and one goal G"
            )
    return tokens


def maze_verdict(inputs: np.ndarray, answer: np.ndarray) -> tuple[np.ndarray, str]:
    """Cells that were no free cells and are now other ones, and whether the rest is a shortest
    path.
    """
    wrong = (answer != inputs) & ~((inputs == maze.FREE) & (answer == maze.PATH))
    if maze.leads(inputs[None], answer[None])[0]:
        return wrong, "a shortest path"
    if maze.solved(inputs) is None:
        return wrong, "wrong: no path leads from S to G"
    return (
        wrong,
        (
            f"wrong: {int(wrong.sum())} cells changed (marked x)"
            if wrong.any()
            else "wrong: what is marked is no shortest path"
        ),
    )


KINDS = {"sudoku": (sudoku_tokens, sudoku_verdict), "maze": (maze_tokens, maze_verdict)}


def own_puzzle(given: str, kind: str, seq_len: int, identifier: int) -> OneExample:
    """The puzzle in `given`, of the kind that the data holds."""
    where, text = read_text(given)
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: this data holds no puzzles that can be typed ({', '.join(KINDS)}); evaluate"
            " its own test set"
        )
    tokens = KINDS[kind][0](where, text, round(seq_len**0.5)).astype(np.int32)
    return OneExample(
        inputs=tokens, labels=np.full_like(tokens, IGNORE), puzzle_identifiers=np.int32(identifier)
    )


class Answer:
    """The answer drawn beside the puzzle, whether it can be right, and how sure the model is."""

    scalars = ()

    def __init__(self, kind: str, vocab_size: int) -> None:
        self._kind, self._vocab_size = kind, vocab_size
        self._rows: dict[str, Tensor] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" in prediction.outputs:
            known = {**batch, **prediction.outputs}
            wanted = ("inputs", "answer", "q_halt_logits", *OUTPUTS)
            self._rows = {name: known[name][:1].cpu() for name in wanted if name in known}

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        inputs, answer = rows["inputs"][0].numpy(), rows["answer"][0].numpy()
        wrong, verdict = KINDS[self._kind][1](inputs, answer)
        lines = [*drawn(self._kind, inputs, answer, wrong, self._vocab_size), verdict]
        if "q_halt_logits" in rows:
            lines.append(f"confidence {float(rows['q_halt_logits'][0].double().sigmoid()):.1%}")
        files = self._by_step(rows, right=not wrong.any() and not verdict.startswith("wrong"))
        return Report(text="\n".join(lines), files={"answer.txt": "\n".join(lines) + "\n", **files})

    def _by_step(self, rows: Mapping[str, Tensor], right: bool) -> Files:
        """The answer after each thinking step, for the report page; nobody knows a wrong one's
        right cells.
        """
        if not {*OUTPUTS} <= rows.keys():
            return {}
        answer = rows["answer"]
        more = {
            "labels": answer if right else torch.full_like(answer, IGNORE),
            "solved": torch.tensor([right]),
            "index": torch.tensor([0]),
        }
        return boards_scene(
            self._kind, "The net's answer after each thinking step.", {**rows, **more}
        )
