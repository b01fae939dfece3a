"""The user's own puzzles: how they are read, and the model's answers to them, judged by the
solver.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contract import IGNORE, Batch, Examples, Prediction, Report
from data.recursive import maze, sudoku
from data.recursive.arc import PAD
from data.recursive.grids import Task
from data.recursive.puzzle_files import PuzzleSplit, plain_split
from data.recursive.puzzle_text import characters, drawn, kind_of, tokens_of
from data.recursive.sudoku import BLANK
from utils.errors import ConfigError, brief, short
from utils.files import read_text

KEY = "data.puzzle"
CELLS = {"sudoku": "a digit, or . for a blank", "maze": "# for a wall, a space or ., one S and G"}
NO_SOLUTION, SEVERAL, RIGHT, WRONG = "no solution", "one of several solutions", "correct", "wrong"
NOT_JUDGED = "not judged"  # its answer is not given

Rows = list[tuple[int, str]]  # the line of each puzzle, counted from 1, and its text


class OwnPuzzles(Examples):
    """An evaluation set of puzzles. Their labels are the solver's, where it finds one solution, or
    the user's.
    """

    def __init__(
        self, puzzle: str, kind: str, seq_len: int, identifier: int, task: Task | None = None
    ) -> None:
        """`puzzle` is one, or a file of them."""
        where, rows = _read(puzzle)
        if kind not in CELLS and not task:
            raise ConfigError(
                f"{where}: this data holds neither Sudoku boards nor mazes, and was not built by"
                " data.build.grids"
            )
        if not rows:
            raise ConfigError(f"{where}: holds no puzzles; write one a line")
        self.kind, self.task, self.lines = kind, task, [line for line, _ in rows]
        named = [(f"{where}: line {line}", text) for line, text in rows]
        ids: Sequence[int] = [identifier] * len(rows)
        # a built task brings its answers, if any; Sudoku boards and mazes are solved here
        if task:
            questions = [task.question(*line) for line in named]
            inputs, answers, ids = zip(*questions, strict=True)
            self.inputs, self.solutions = np.stack(inputs), np.stack(answers)
            self.counts = np.where(self.solutions.any(1), 1, 0)
        else:
            self.inputs = np.stack([_tokens(*line, kind, seq_len) for line in named])
            # labels to compare with, and a verdict for boards that the net has never seen solved
            solve = sudoku.solve if kind == "sudoku" else maze.solve_all
            # solutions: 2 is several, and -1 if the solver gives up
            self.counts, self.solutions = solve(self.inputs)
        # a label only where there is one right answer
        known = (self.counts[:, None] == 1) & (self.solutions != PAD)
        self.labels = np.where(known, self.solutions.astype(np.int32), IGNORE)
        super().__init__(
            {
                "inputs": self.inputs.astype(np.int32),
                "labels": self.labels,
                "puzzle_identifiers": np.array(ids, np.int32),
            }
        )

    def judge(self, index: int, answer: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns the verdict on an answer, and which cells are wrong."""
        count, inputs = self.counts[index], self.inputs[index]
        # by the rules, as several shortest paths may be right; else by the label if there is one
        if self.kind == "maze":
            wrong = ~maze.keeps_maze(inputs, answer)
            right = maze.leads(inputs[None], answer[None])[0]
        elif count == 1:
            wrong = (self.labels[index] != IGNORE) & (answer != self.labels[index])
            right = not wrong.any()
        elif self.task:
            return NOT_JUDGED, np.zeros(len(inputs), bool)
        else:  # no solution to compare with: what counts are the rules
            wrong = (inputs > BLANK) & (answer != inputs) | sudoku.against_rules(answer)
            right = not wrong.any()
        if count == 0:
            return NO_SOLUTION, wrong
        return (RIGHT if count == 1 else SEVERAL) if right else WRONG, wrong

    def text(self, tokens: np.ndarray) -> str:
        """Returns a puzzle or an answer as it is typed."""
        return self.task.text(tokens) if self.task else characters(self.kind, tokens)


def split_like(puzzle: str) -> PuzzleSplit:
    """Returns the user's first puzzle as a dataset: weights answer a Sudoku board or a maze without
    the data that they were trained on.
    """
    where, given = _read(puzzle)
    line, text = given[0] if given else (1, "")
    kind = "maze" if {"S", "G"} <= {*text} else "sudoku"
    text = text if kind == "maze" else "".join(text.split())
    vocab_size = len(maze.CHARACTERS) + 1 if kind == "maze" else round(len(text) ** 0.5) + 2
    tokens = tokens_of(kind, [text])
    if not text or not tokens.min() or kind_of(tokens, tokens, vocab_size) != kind:
        raise ConfigError(
            f"{where}: line {line} is neither a Sudoku board nor a maze: {len(text)} cells; other"
            " puzzles need the data that the weights were trained on, as data_path"
        )
    return plain_split(where, vocab_size, tokens, tokens, copies=1)


def _read(puzzle: str) -> tuple[str, Rows]:
    """Returns the name of the puzzles in messages, and the puzzles."""
    where = f"{KEY}={short(puzzle)}"
    if not os.path.exists(puzzle):
        return f"{where} (which is not a file)", [(1, puzzle)]
    try:
        text = read_text(Path(puzzle))
        return where, _rows(text.removeprefix("\ufeff"))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{where}: cannot be read ({brief(error)}); give a text file") from None


def _rows(text: str) -> Rows:
    """Reads a CSV file whose header names `question`, or else a puzzle a line."""
    table = csv.DictReader(StringIO(text))
    if "question" in (table.fieldnames or ()):
        return [(table.line_num, row["question"] or "") for row in table]
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _tokens(where: str, text: str, kind: str, cells: int) -> np.ndarray:
    if kind == "sudoku":  # rows and boxes may be set apart; in a maze, a space is a free cell
        text = "".join(text.split())
    if len(text) != cells:
        raise ConfigError(
            f"{where} has {len(text)} cells, and the puzzles of these weights have {cells}"
        )
    # 0 is a character without a meaning
    tokens = tokens_of(kind, [text])[0].astype(np.int32)
    # characters of another kind or size, or a maze without its ends, would be answered with
    # nonsense
    most = round(cells**0.5) + 1 if kind == "sudoku" else maze.GOAL
    ends = [(tokens == end).sum() for end in (maze.START, maze.GOAL)]
    if not (tokens.min() and tokens.max() <= most) or (kind == "maze" and ends != [1, 1]):
        raise ConfigError(f"{where} is not a {kind} of this size; its cells are {CELLS[kind]}")
    return tokens


class Answers:
    """All answers as a table, how many are right, and the first that is not drawn beside its
    puzzle.
    """

    scalars = ()

    def __init__(self, puzzles: OwnPuzzles) -> None:
        self._puzzles = puzzles
        self._found: list[dict[str, Tensor]] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        outputs = prediction.outputs
        wanted = {"answer", "q_halt_logits"} & outputs.keys()
        if "answer" in wanted:
            rows = {name: outputs[name][: len(indices)].cpu() for name in wanted}
            self._found.append(rows | {"index": torch.from_numpy(indices.copy())})

    def rows(self) -> dict[str, Tensor]:
        names = self._found[0] if self._found else ()
        return {name: torch.cat([part[name] for part in self._found]) for name in names}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        # in the order of the user's lines, whichever rank answered them
        puzzles, order = self._puzzles, rows["index"].argsort()
        answers = rows["answer"][order].numpy()
        judged = [puzzles.judge(index, answer) for index, answer in enumerate(answers)]
        confidence = [""] * len(answers)
        if "q_halt_logits" in rows:
            shares = rows["q_halt_logits"][order].double().sigmoid().tolist()
            confidence = [f"{share:.1%}" for share in shares]

        # the table of all answers
        written = StringIO()
        table = csv.writer(written, lineterminator="\n")
        table.writerow(["line", "question", "answer", "verdict", "confidence"])
        for index, answer in enumerate(answers):
            question, cells = puzzles.text(puzzles.inputs[index]), puzzles.text(answer)
            verdict = judged[index][0]
            table.writerow([puzzles.lines[index], question, cells, verdict, confidence[index]])

        # the first that is not right, drawn
        shown = next((at for at, (verdict, _) in enumerate(judged) if verdict != RIGHT), 0)
        verdict, wrong = judged[shown]
        lines = []
        if len(answers) > 1:
            counts = Counter(verdict for verdict, _ in judged)
            verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
            lines += [f"{len(answers):,} puzzles: {verdicts}", f"line {puzzles.lines[shown]}:"]
        board = puzzles.inputs[shown], answers[shown]
        lines += drawn(puzzles.kind, *board, wrong, puzzles.task)
        lines.append(f"{verdict} ({wrong.sum()} cells, marked x)" if wrong.any() else verdict)
        if confidence[shown]:
            lines.append(f"confidence {confidence[shown]}")
        return Report(text="\n".join(lines), files={"answers.csv": written.getvalue()})
