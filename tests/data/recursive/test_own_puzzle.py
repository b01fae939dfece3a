"""Puzzles of the user's own: how they are read, and what a run says of answers to them."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from contract import IGNORE, Report
from data.recursive.boards import Boards
from data.recursive.own_puzzle import Answers, OwnPuzzles
from data.recursive.sudoku import BLANK
from tests.data.helpers import joined, reported
from tests.data.recursive.helpers import source
from tests.data.recursive.test_maze import tokens
from utils.errors import ConfigError

LINE = "123...1221434321"
RIGHT = "1234341221434321"
MAZE = "S #  #..G"


def digits(text: str) -> np.ndarray:
    return np.array([int(digit) + BLANK for digit in text])


def read(given: str, kind: str = "sudoku", cells: int = 16) -> list[list[int]]:
    return OwnPuzzles(given, kind, cells, 0).inputs.tolist()


def answered(puzzles: OwnPuzzles, answers: np.ndarray) -> Report:
    """The report on these answers, which come in two batches, the last first."""
    batches, half = [], len(answers) // 2
    for part in filter(len, (np.arange(half, len(answers)), np.arange(half))):
        rows = joined([puzzles.read(part), puzzles.padding(1)])
        batch = {name: torch.from_numpy(array) for name, array in rows.items()}
        answer = torch.from_numpy(np.concatenate([answers[part], puzzles.inputs[:1]]))
        outputs = {
            "answer": answer,
            "q_halt_logits": torch.full((len(answer),), 2.0),
            "answer_by_step": answer[:, None].to(torch.uint8),
            "right_by_step": (answer == batch["labels"]).sum(-1, keepdim=True),
            "halt_margin_by_step": torch.full((len(answer), 1), 2.0),
            "halt_step": torch.ones(len(answer), dtype=torch.long),
        }
        batches.append((part, batch, outputs))
    boards = Boards(puzzles.kind, puzzles.task)
    told, pictured = reported(Answers(puzzles), *batches), reported(boards, *batches)
    return Report(text=told.text, files={**told.files, **pictured.files})


@pytest.mark.parametrize(
    "text",
    [
        f"{LINE}\n{RIGHT}\n",
        f"\ufeff{LINE}\r\n\r\n{RIGHT}\r\n",
        "123. ..12 2143 4321\n1234341221434321",
        f"source,question,answer,rating\nme,{LINE},{RIGHT},3\n\nme,{RIGHT},{RIGHT},4\n",
    ],
)
def test_a_file_is_a_table_or_has_a_board_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "boards").write_text(text, newline="")
    expected = [digits(LINE.replace(".", "0")).tolist(), digits(RIGHT).tolist()]
    assert read(str(tmp_path / "boards")) == expected


def test_a_typed_board_has_the_labels_of_its_only_solution() -> None:
    made = OwnPuzzles("123_ ..12 2143 4321", "sudoku", 16, 3)
    one = made.read(np.arange(1))
    assert (one["labels"][0] == digits(RIGHT)).all()
    assert one["puzzle_identifiers"] == 3
    assert (made.padding(2)["labels"] == IGNORE).all()
    assert (OwnPuzzles("." * 16, "sudoku", 16, 0).read(np.arange(1))["labels"] == IGNORE).all()


@pytest.mark.parametrize(
    ("given", "answer", "said"),
    [
        (LINE, RIGHT, "correct"),
        (LINE, "1234341221434312", "wrong (2 cells, marked x)"),
        ("." * 16, RIGHT, "one of several solutions"),
        ("." * 16, "1134" + RIGHT[4:], "wrong (3 cells, marked x)"),
        ("12....3.......4.", RIGHT, "no solution (2 cells, marked x)"),
        (MAZE, "S #o #ooG", "correct"),
        (MAZE, "So# o# oG", "correct"),
        (MAZE, "So#oo#ooG", "wrong"),
        ("S##G", "S##G", "no solution"),
    ],
)
def test_answers_are_judged_by_what_the_solver_finds(given: str, answer: str, said: str) -> None:
    kind = "maze" if "S" in given else "sudoku"
    cells = tokens(answer).astype(np.int64) if kind == "maze" else digits(answer)
    lines = answered(OwnPuzzles(given, kind, len(cells), 0), cells[None]).text.split("\n")
    assert lines[-2:] == [said, "confidence 88.1%"]


def test_many_answers_become_a_table(tmp_path: Path) -> None:
    lines = [LINE, "." * 16, LINE, "12....3.......4.", *[RIGHT] * 20]
    (tmp_path / "boards").write_text("\n" + "\n".join(lines))
    answers = np.tile(digits(RIGHT), (24, 1))
    answers[2, 3] = BLANK
    made = answered(OwnPuzzles(str(tmp_path / "boards"), "sudoku", 16, 0), answers)
    counts = "24 puzzles: 21 correct, 1 one of several solutions, 1 wrong, 1 no solution"
    assert made.text.split("\n")[:2] == [counts, "line 3:"]
    table = list(csv.DictReader(io.StringIO(made.files["answers.csv"])))
    assert [row["line"] for row in table] == [str(number) for number in range(2, 26)]
    assert [row["question"] for row in table] == lines
    assert table[2]["answer"] == "123." + RIGHT[4:]
    assert [row["verdict"] for row in table[:3]] == ["correct", "one of several solutions", "wrong"]
    assert {row["confidence"] for row in table} == {"88.1%"}
    shown = json.loads(made.files["boards.scene.json"])["examples"]
    assert {one["index"]: one["solved"] for one in shown if one["index"] < 4} == {0: True, 2: False}


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("sudoku", "1234", "4 cells, and the puzzles of these weights have 16"),
        ("sudoku", "5" + "." * 15, "not a sudoku"),
        ("sudoku", "board.txt", "which is not a file"),
        ("sudoku", "{folder}", "cannot be read"),
        ("sudoku", "{folder}/short", "line 3 has 15 cells"),
        ("sudoku", "{folder}/empty", "holds no puzzles"),
        ("maze", "SS" + "." * 13 + "G", "not a maze"),
        ("", "1", "neither Sudoku boards nor mazes, and was"),
    ],
)
def test_wrong_puzzles_are_named(tmp_path: Path, kind: str, given: str, named: str) -> None:
    (tmp_path / "short").write_text(f"{LINE}\n\n{LINE[1:]}\n")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match=named) as error:
        OwnPuzzles(given.replace("{folder}", str(tmp_path)), kind, 16, 0)
    assert str(error.value).startswith("data.puzzle=")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("puzzle", "kind", "cells"), [(LINE, "sudoku", 16), (MAZE, "maze", 9)])
def test_a_puzzle_needs_no_dataset(puzzle: str, kind: str, cells: int) -> None:
    made = source(puzzle=puzzle, data_path="gone", eval_only=True)
    assert made.spec.seq_len == cells
    assert len(made.eval_sets()["puzzle"]) == 1
    told = [own for own in made.evaluators("puzzle") if isinstance(own, Boards)]
    assert [own._kind for own in told] == [kind]
    with pytest.raises(ConfigError, match=r"neither a Sudoku board nor a maze: 7 cells; other"):
        source(puzzle="[[1, 2]]", data_path="gone", eval_only=True)


def test_a_source_evaluates_nothing_else_and_needs_no_length() -> None:
    embedded = {"size": 4, "train": 1, "test": 10, "blanks": 7}
    made = source(puzzle=LINE, embedded=embedded, eval_only=True)
    assert list(made.eval_sets()) == ["puzzle"]
    assert [type(one) for one in made.evaluators("puzzle")] == [Answers, Boards]
