"""Puzzles that the user has typed or written into a file, and a model's answers to them."""

# N puzzles, T cells

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from io import StringIO
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.recursive import maze
from data.recursive.boards import OUTPUTS, boards_scene, characters
from data.recursive.own_text import (
    Puzzle,
    maze_puzzles,
    maze_tokens,
    read_text,
    sudoku_puzzles,
    sudoku_tokens,
)
from data.recursive.puzzle_text import drawn
from data.recursive.sudoku import WIDTH, geometry, is_solved, search, to_digits, to_masks
from data.recursive.sudoku_sets import BLANK
from data.source import IGNORE, Arrays, Batch
from utils.errors import ConfigError
from utils.measure.evaluator import Prediction, Report
from utils.measure.scene import Files, fitting

# guesses after which nobody knows how many solutions a board has; one of size 9 that has a single
# one takes fewer
DEEP = 20_000
NARROW = 16  # boards searched together where there is no end of solutions
PICTURED = 8  # puzzles on the report page, the first ones
NO_SOLUTION, SEVERAL, RIGHT, WRONG = (
    "no solution",
    "one of several solutions",
    "correct",
    "wrong",
)
# how the numbers of each are told
COUNTED = {
    RIGHT: "correct",
    WRONG: "wrong",
    SEVERAL: "answered with one of several solutions",
    NO_SOLUTION: "without a solution",
}


class Judged(NamedTuple):
    """The verdict on one answer."""

    verdict: str  # one of COUNTED
    text: str
    wrong: np.ndarray  # cells


class OwnPuzzles:
    """An evaluation set of puzzles without labels, which are there to be answered and not to be
    measured.
    """

    def __init__(self, kind: str, inputs: np.ndarray, lines: list[int], identifier: int) -> None:
        self.kind, self.inputs, self.lines = kind, inputs, lines
        self._identifier = identifier

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: np.ndarray) -> Arrays:
        inputs = self.inputs[indices]
        return {
            "inputs": inputs,
            "labels": np.full_like(inputs, IGNORE),
            "puzzle_identifiers": np.full(len(indices), self._identifier, np.int32),
        }

    def padding(self, rows: int) -> Arrays:
        """Repeats the first puzzle, so that ranks without one take as long as the others."""
        return self.read(np.zeros(rows, np.int64))

    @cached_property
    def solutions(self) -> tuple[np.ndarray, np.ndarray]:
        """How many solutions each puzzle has (2: more than one, -1: not known), and one of them."""
        return SOLVERS[self.kind](self.inputs)


def own_puzzles(given: str, kind: str, seq_len: int, identifier: int) -> OwnPuzzles:
    """The puzzles in `given`, of the kind that the data holds."""
    where, text = read_text(given)
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: this data holds no puzzles that can be typed ({', '.join(KINDS)}); evaluate"
            " its own test set"
        )
    puzzles_in, tokens_of = KINDS[kind]
    side = round(seq_len**0.5)
    puzzles = puzzles_in(where, text, side)
    inputs = np.stack([tokens_of(puzzle, side) for puzzle in puzzles]).astype(np.int32)
    return OwnPuzzles(kind, inputs, [puzzle.line for puzzle in puzzles], identifier)


KINDS: dict[
    str,
    tuple[Callable[[str, str, int], list[Puzzle]], Callable[[Puzzle, int], np.ndarray]],
] = {"sudoku": (sudoku_puzzles, sudoku_tokens), "maze": (maze_puzzles, maze_tokens)}


def solve_boards(inputs: np.ndarray, deep: int = DEEP) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of solutions of Sudoku boards, -1 where a search takes too long, and one
    solution each.
    """
    counts, solutions = np.full(len(inputs), -1), np.full(inputs.shape, IGNORE)
    # a board with few clues has so many solutions that a wide search does not get to the bottom
    for width in (WIDTH, NARROW):
        left = np.flatnonzero(counts < 0)
        for start in range(0, len(left), width):
            some = left[start : start + width]
            counts[some], solutions[some] = _search_boards(inputs[some], deep, width)
    return counts, solutions


def _search_boards(inputs: np.ndarray, deep: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    size = round(inputs.shape[1] ** 0.5)
    masks = to_masks(inputs - BLANK, size)
    found = search(masks, size, limit=2, most_guesses=deep, width=width)
    counts = np.where(found.guesses > deep, -1, found.counts)
    solutions = np.full(inputs.shape, IGNORE)
    known = counts > 0
    solutions[known] = to_digits(found.solutions[:, known]) + BLANK
    return counts, solutions


def solve_mazes(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether a path leads through each maze, and a shortest one."""
    answers = [maze.solve(one) for one in inputs]
    unknown = np.full(inputs.shape[1], IGNORE)
    solutions = [unknown if one is None else one for one in answers]
    return np.array([one is not None for one in answers], np.int64), np.stack(solutions)


SOLVERS = {"sudoku": solve_boards, "maze": solve_mazes}


def judge_board(inputs: np.ndarray, answer: np.ndarray, count: int, solution: np.ndarray) -> Judged:
    """By the solution, where there is one alone; else by clues and rules."""
    size = round(len(inputs) ** 0.5)
    changed = (inputs > BLANK) & (answer != inputs)
    keeps = bool(is_solved(answer[None].astype(np.int64) - BLANK, size)[0]) and not changed.any()
    if count == 1 and not keeps:
        wrong = answer != solution
        clues = f", {int(changed.sum())} of them clues" if changed.any() else ""
        return Judged(WRONG, f"wrong: {_cells(wrong)}{clues} (marked x)", wrong)
    wrong = changed | _against_rules(answer, size)
    if count == 0:
        text = "the board has no solution: its clues contradict each other"
        return Judged(NO_SOLUTION, text, wrong)
    more = "the board has several solutions" if count > 1 else "how many solutions is unknown"
    if keeps:
        if count == 1:
            return Judged(RIGHT, "correct: the only solution", wrong)
        return Judged(SEVERAL, f"keeps the clues and the rules; {more}", wrong)
    text = f"wrong: {_cells(wrong)} against clues and rules (marked x); {more}"
    return Judged(WRONG, text, wrong)


def _cells(which: np.ndarray) -> str:
    """How many there are."""
    return f"{int(which.sum())} cell" + ("" if which.sum() == 1 else "s")


def _against_rules(answer: np.ndarray, size: int) -> np.ndarray:
    """Cells that hold no digit, or one that a unit of theirs has twice."""
    board = answer.astype(np.int64) - BLANK
    wrong = (board < 1) | (board > size)
    for unit in geometry(size).units:
        wrong[unit] |= (board[unit][:, None] == board[unit]).sum(1) > 1
    return wrong


def judge_maze(inputs: np.ndarray, answer: np.ndarray, count: int, solution: np.ndarray) -> Judged:
    """Any shortest path is right; wrong are cells that were no free ones and are now others."""
    wrong = (answer != inputs) & ~((inputs == maze.FREE) & (answer == maze.PATH))
    if count == 0:
        return Judged(NO_SOLUTION, "the maze has no solution: no path leads from S to G", wrong)
    if maze.leads(inputs[None], answer[None])[0]:
        return Judged(RIGHT, "correct: a shortest path", wrong)
    text = (
        f"wrong: {_cells(wrong)} changed (marked x)"
        if wrong.any()
        else "wrong: what is marked is no shortest path"
    )
    return Judged(WRONG, text, wrong)


JUDGES = {"sudoku": judge_board, "maze": judge_maze}


def judge_own(puzzles: OwnPuzzles, index: int, answer: np.ndarray) -> Judged:
    """Returns the verdict on the answer to one of the puzzles."""
    counts, solutions = puzzles.solutions
    judge = JUDGES[puzzles.kind]
    return judge(puzzles.inputs[index], answer, int(counts[index]), solutions[index])


class _Keeping:
    """An evaluator that measures nothing, and keeps some rows of each batch."""

    scalars = ()

    def __init__(self, puzzles: OwnPuzzles) -> None:
        self._puzzles = puzzles
        self._found: list[dict[str, Tensor]] = []

    def rows(self) -> dict[str, Tensor]:
        names = self._found[0] if self._found else ()
        return {name: torch.cat([part[name] for part in self._found]) for name in names}


class Answers(_Keeping):
    """One answer drawn beside its puzzle, whether it is right, and how sure the model is; several
    as a table, and the first drawn that is not right.
    """

    def __init__(self, puzzles: OwnPuzzles, vocab_size: int) -> None:
        super().__init__(puzzles)
        self._vocab_size = vocab_size

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" not in prediction.outputs:
            return
        wanted = {"answer", "q_halt_logits"} & prediction.outputs.keys()
        rows = {name: prediction.outputs[name][: len(indices)].cpu() for name in wanted}
        self._found.append(rows | {"index": torch.from_numpy(indices.copy())})

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        order = rows["index"].argsort()
        answers = rows["answer"][order].numpy()
        sure = rows["q_halt_logits"][order].double().sigmoid() if "q_halt_logits" in rows else None
        said = [judge_own(self._puzzles, index, answer) for index, answer in enumerate(answers)]
        confidences = [""] * len(answers) if sure is None else [f"{one:.1%}" for one in sure]
        if len(answers) == 1:
            text = "\n".join(self._drawn(0, answers[0], said[0], confidences[0]))
            return Report(text=text, files={"answer.txt": f"{text}\n"})
        counts = Counter(one.verdict for one in said)
        told = [f"{counts[verdict]:,} {how}" for verdict, how in COUNTED.items() if counts[verdict]]
        if repeated := len(answers) - len(np.unique(self._puzzles.inputs, axis=0)):
            told.append(f"{repeated:,} of them repeated")
        lines = [f"{len(said):,} puzzles: {', '.join(told)}; answers.csv has them all"]
        if others := [index for index, one in enumerate(said) if one.verdict != RIGHT]:
            first = others[0]
            lines.append(f"line {self._puzzles.lines[first]}:")
            lines += self._drawn(first, answers[first], said[first], confidences[first])
        table = self._table(answers, [one.verdict for one in said], confidences)
        return Report(text="\n".join(lines), files={"answers.csv": table})

    def _drawn(self, index: int, answer: np.ndarray, said: Judged, sure: str) -> list[str]:
        puzzles = self._puzzles
        lines = drawn(puzzles.kind, puzzles.inputs[index], answer, said.wrong, self._vocab_size)
        return [*lines, said.text, *([f"confidence {sure}"] if sure else [])]

    def _table(self, answers: np.ndarray, verdicts: list[str], confidences: list[str]) -> str:
        written, kind = StringIO(), self._puzzles.kind
        table = csv.writer(written, lineterminator="\n")
        table.writerow(["line", "question", "answer", "verdict", "confidence"])
        for index, answer in enumerate(answers):
            question = characters(kind, self._puzzles.inputs[index])
            shown = characters(kind, answer)
            line = self._puzzles.lines[index]
            table.writerow([line, question, shown, verdicts[index], confidences[index]])
        return written.getvalue()


class AnswersByStep(_Keeping):
    """The answers to the first puzzles after each thinking step, for the report page."""

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        known = {**batch, **prediction.outputs}
        first = np.flatnonzero(indices < PICTURED)
        if len(first) and {*OUTPUTS} <= known.keys():
            rows = {name: known[name][first].cpu() for name in ("inputs", "answer", *OUTPUTS)}
            self._found.append(rows | {"index": torch.from_numpy(indices[first])})

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        order = rows["index"].argsort()
        sorted_rows = {name: tensor[order] for name, tensor in rows.items()}
        answers = sorted_rows["answer"].numpy()
        said = [judge_own(self._puzzles, index, answer) for index, answer in enumerate(answers)]
        counts, solutions = self._puzzles.solutions
        # a right answer need not be the solution that was found; nobody knows the right cells where
        # there are several
        right = np.array([one.verdict in (RIGHT, SEVERAL) for one in said])
        known = right | (counts[: len(answers)] == 1)
        labels = np.where(right[:, None], answers, solutions[: len(answers)])
        more = {
            "labels": torch.from_numpy(np.where(known[:, None], labels, IGNORE)),
            "solved": torch.from_numpy(right),
        }
        return Report(files=self._scene({**sorted_rows, **more}))

    def _scene(self, rows: Mapping[str, Tensor]) -> Files:
        def made(some: Sequence[int]) -> Files:
            taken = {name: tensor[list(some)] for name, tensor in rows.items()}
            caption = "The net's answer after each thinking step."
            return boards_scene(self._puzzles.kind, caption, taken)

        return fitting(range(len(rows["index"])), made)
