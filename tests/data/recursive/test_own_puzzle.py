"""A puzzle of the user's own: how it is read, what is said of an answer, and that a run prints
it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.recursive.own_puzzle import Answer, own_puzzle
from data.recursive.puzzles import PuzzleSource
from tests.data.recursive.test_maze import tokens
from utils.errors import ConfigError
from utils.measure.report import Prediction

BOARD = "1 2 | 3 .\n. . | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 1"
MAZE = "S #\n  #\n..G"


def answered(kind: str, given: str, answer: np.ndarray, vocab_size: int, halt: float = 2.0) -> str:
    example = own_puzzle(given, kind, len(answer), 0)
    batch = {name: torch.from_numpy(rows) for name, rows in example.read(np.arange(1)).items()}
    shown = Answer(kind, vocab_size)
    padding = example.padding(1)["inputs"]
    outputs = {
        "answer": torch.from_numpy(np.stack([answer, padding[0]])),
        "q_halt_logits": torch.tensor([halt, -halt]),
    }
    shown.add(np.arange(1), batch, Prediction({}, outputs))
    report = shown.report(shown.rows())
    assert report.files == {"answer.txt": report.text + "\n"}
    outputs |= {
        "answer_by_step": outputs["answer"][:, None].to(torch.uint8),
        "halt_margin_by_step": torch.tensor([[halt], [-halt]]),
        "halt_step": torch.tensor([1, 0]),
    }
    shown.add(np.arange(1), batch, Prediction({}, outputs))
    made = json.loads(shown.report(shown.rows()).files["boards.scene.json"])
    assert len(made["examples"][0]["answers"][0]) == len(answer)
    known = "-" not in made["examples"][0]["labels"]
    valid = "keeps the clues" in report.text or "a shortest path" in report.text
    assert known == made["examples"][0]["solved"] == valid
    return report.text


def test_a_board_is_read_however_it_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "board.txt").write_text(BOARD)
    read = [
        own_puzzle(given, "sudoku", 16, 3).read(np.arange(1))
        for given in (BOARD, str(tmp_path / "board.txt"), "123_..1221434321")
    ]
    for one in read:
        assert one["inputs"][0].tolist() == [2, 3, 4, 1, 1, 1, 2, 3, 3, 2, 5, 4, 5, 4, 3, 2]
        assert (one["labels"] == -100).all()
        assert one["puzzle_identifiers"] == 3


@pytest.mark.parametrize(
    ("digits", "last"),
    [
        ("1234341221434321", "confidence 88.1%"),
        ("1234341221434321", "keeps the clues and the rules"),
        ("1234341221434312", "wrong: 2 clues changed, 4 cells against the rules (marked x)"),
        ("1233341221434321", "wrong: 0 clues changed, 3 cells against the rules (marked x)"),
        ("2143432112343412", "wrong: 13 clues changed, 13 cells against the rules (marked x)"),
    ],
)
def test_answers_to_boards_are_judged_by_clues_and_rules(digits: str, last: str) -> None:
    text = answered("sudoku", BOARD, np.array([int(digit) + 1 for digit in digits]), 6)
    assert last in text.split("\n")
    assert ("keeps the clues and the rules" in text) == (digits == "1234341221434321")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("S #o #ooG", "a shortest path"),
        ("So# o# oG", "a shortest path"),
        ("Soo o# oG", "wrong: 1 cells changed (marked x)"),
        ("So#oo#ooG", "wrong: what is marked is no shortest path"),
    ],
)
def test_answers_to_mazes_are_judged_by_their_paths(answer: str, said: str) -> None:
    assert said in answered("maze", MAZE, tokens(answer).astype(np.int64), 6).split("\n")


def test_a_maze_without_a_way_says_so() -> None:
    assert "wrong: no path leads from S to G" in answered(
        "maze", "S##G", tokens("S##G").astype(np.int64), 6
    )


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("sudoku", "1234", "data.puzzle=1234: has 4 cells, not 4 × 4"),
        ("sudoku", "5" + "." * 15, "has 5; cells are 1 to 4, or . for a blank"),
        ("sudoku", "11" + "." * 14, "has 1 twice in row 1; correct it"),
        ("sudoku", "1..." * 2 + "." * 8, "has 1 twice in column 1; correct it"),
        ("sudoku", "1....1" + "." * 10, "has 1 twice in box 1; correct it"),
        ("maze", "S..\n...\n", "has 2 rows of 3 cells, not 4 × 4"),
        ("maze", "S" + "." * 15, "has 0 G; a maze has one start S and one goal G"),
        ("maze", "SS" + "." * 13 + "G", "has 2 S; a maze"),
        ("maze", "So" + "." * 13 + "G", "has o; cells are # for a wall"),
        ("", "1", "this data holds no puzzles that can be typed (sudoku, maze)"),
    ],
)
def test_wrong_puzzles_are_named(kind: str, given: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        own_puzzle(given, kind, 16, 0)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_source_evaluates_nothing_else() -> None:
    embedded = {"size": 4, "train": 40, "test": 10, "blanks": 7}
    given = {
        "seed": 0,
        "shards": 2,
        "global_batch_size": 8,
        "epochs": 1,
        "embedded": embedded,
        "puzzle": BOARD,
    }
    made = PuzzleSource(**given, eval_only=True)
    assert list(made.eval_sets()) == ["puzzle"]
    assert [type(one) for one in made.evaluators("puzzle")] == [Answer]
    with pytest.raises(
        ConfigError,
        match=r"^data.puzzle=.*: a trained model answers it; add eval_only=true and checkpoint=",
    ):
        PuzzleSource(**given)
