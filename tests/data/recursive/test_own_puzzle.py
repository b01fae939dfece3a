"""Puzzles of the user's own: how they are read, what is said of answers, and that a run prints
them.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from data.recursive.own_puzzle import Answers, AnswersByStep, OwnPuzzles, own_puzzles, solve_boards
from data.recursive.puzzles import PuzzleSource
from data.recursive.sudoku import generate, is_solved
from data.recursive.sudoku_sets import BLANK
from data.source import IGNORE
from tests.data.recursive.test_maze import tokens
from tests.ranks import ROOT
from tests.sources import opened
from utils.errors import ConfigError
from utils.measure.evaluator import Prediction, Report

BOARD = "1 2 | 3 .\n. . | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 1"
LINE = "123...1221434321"
RIGHT = "1234341221434321"
MAZE = "S #\n  #\n..G"


def digits(text: str) -> np.ndarray:
    return np.array([int(digit) + BLANK for digit in text])


def answered(puzzles: OwnPuzzles, answers: np.ndarray, vocab_size: int) -> Report:
    """The report on these answers, which come in two batches, the last first."""
    shown: list = [Answers(puzzles, vocab_size), AnswersByStep(puzzles)]
    half = len(answers) // 2
    for part in (np.arange(half, len(answers)), np.arange(half)):
        if not len(part):
            continue
        rows = [puzzles.read(part), puzzles.padding(1)]
        batch = {
            name: torch.from_numpy(np.concatenate([one[name] for one in rows])) for name in rows[0]
        }
        answer = torch.from_numpy(np.concatenate([answers[part], puzzles.inputs[:1]]))
        logits = torch.full((len(answer),), 2.0)
        outputs = {
            "answer": answer,
            "q_halt_logits": logits,
            "answer_by_step": answer[:, None].to(torch.uint8),
            "halt_margin_by_step": logits[:, None],
            "halt_step": torch.ones(len(answer), dtype=torch.long),
        }
        for one in shown:
            one.add(part, batch, Prediction({}, outputs))
    told, pictured = (one.report(one.rows()) for one in shown)
    return Report(text=told.text, files={**told.files, **pictured.files})


def one_answer(kind: str, given: str, answer: np.ndarray) -> list[str]:
    """The lines that are said of one answer; the picture agrees with them."""
    made = answered(own_puzzles(given, kind, len(answer), 0), answer[None], 6)
    assert made.files["answer.txt"] == made.text + "\n"
    (example,) = json.loads(made.files["boards.scene.json"])["examples"]
    lines = made.text.split("\n")
    assert lines[-1] == "confidence 88.1%"
    assert example["solved"] == lines[-2].startswith(("correct", "keeps"))
    if example["solved"]:
        assert example["labels"] == example["answers"][0]
    return lines


def read(given: str, kind: str = "sudoku", cells: int = 16) -> list[list[int]]:
    return own_puzzles(given, kind, cells, 0).inputs.tolist()


def test_a_board_is_read_however_it_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "board.txt").write_text(BOARD)
    for given in (BOARD, str(tmp_path / "board.txt"), "123_..1221434321"):
        made = own_puzzles(given, "sudoku", 16, 3)
        one = made.read(np.arange(1))
        assert one["inputs"][0].tolist() == [2, 3, 4, 1, 1, 1, 2, 3, 3, 2, 5, 4, 5, 4, 3, 2]
        assert (one["labels"] == IGNORE).all()
        assert one["puzzle_identifiers"] == 3
        assert made.lines == [1]


@pytest.mark.parametrize(
    "text",
    [
        f"{LINE}\n{RIGHT}\n",
        f"\ufeff{LINE}\r\n\r\n{RIGHT}\r\n",
        f"# mine\n{LINE}\n\n# the answer\n{RIGHT}",
        f"Grid 01\n{BOARD}\nGrid 02\n1234\n3412\n2143\n4321\n",
        f"{BOARD}\n\n\n{BOARD.replace('3 .', '3 4').replace('. . ', '3 4 ')}\n",
        f"source,question,answer,rating\nme,{LINE},{RIGHT},3\nme,{RIGHT},{RIGHT},4\n",
        f"id;puzzle\n1;{LINE}\n\n2;{RIGHT}\n",
        f"quizzes,solutions\n{LINE},{RIGHT}\n{RIGHT},{RIGHT}\n",
        f"puzzle\n{LINE}\n{RIGHT}\n",
        f"{LINE},{RIGHT}\n{RIGHT},{RIGHT}\n",
        "1,2,3,\n,,1,2\n2,1,4,3\n4,3,2,1\n1,2,3,4\n3,4,1,2\n2,1,4,3\n4,3,2,1\n",
        f"{BOARD}\n12|34\n34|12\n21|43\n43|21".translate(str.maketrans("|-+", "│─┼")),
    ],
)
def test_a_file_may_hold_many_boards(tmp_path: Path, text: str) -> None:
    (tmp_path / "boards").write_text(text, newline="")
    assert read(str(tmp_path / "boards")) == [
        digits(LINE.replace(".", "0")).tolist(),
        digits(RIGHT).tolist(),
    ]


def test_large_boards_may_be_written_in_numbers() -> None:
    ((boards, _),) = generate(16, (1,), 60, seed=0)
    expected = (boards + BLANK).tolist()
    rows = boards.reshape(16, 16)
    letters = "".join("." if cell == 0 else "0123456789ABCDEFG"[cell] for cell in boards[0])
    assert read(letters, cells=256) == expected
    assert read(letters.lower(), cells=256) == expected
    spaced = "\n".join(" ".join(str(cell) for cell in row) for row in rows)
    assert read(spaced, cells=256) == expected
    assert read(spaced.replace(" ", ","), cells=256) == expected
    assert read(spaced.replace(" ", " | "), cells=256) == expected
    with pytest.raises(ConfigError, match=r"has both 0 and \. or _"):
        read("0" + letters[1:].replace("0", "."), cells=256)


@pytest.mark.parametrize(
    "text",
    [
        "S.#..#..GS....#..G",
        "S.#..#..G\nS....#..G\n",
        "S #\n  #\n..G\n\nS..\n..#\n..G\n",
        "s #\r\n  #\r\n  g\r\n\r\nS\r\n  #\r\n  G\r\n",
        "source,question,answer,rating\na,S #  #  G,SoooooG,3\nb,S    #  G,,3\n",
        "S #  #  G\nS    #  G\n",
    ],
)
def test_a_file_may_hold_many_mazes(tmp_path: Path, text: str) -> None:
    (tmp_path / "mazes").write_text(text, newline="")
    expected = [tokens("S #  #  G").tolist(), tokens("S    #  G").tolist()]
    if "\n" not in text:
        with pytest.raises(ConfigError, match="has 18 cells, not 3 × 3"):
            read(str(tmp_path / "mazes"), "maze", 9)
    else:
        assert read(str(tmp_path / "mazes"), "maze", 9) == expected


def test_puzzles_may_come_from_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{LINE}\n{RIGHT}\n"))
    assert len(read("-")) == 2
    with pytest.raises(ConfigError, match=r"^data.puzzle=-: the standard input is empty"):
        read("-")


@pytest.mark.parametrize(
    ("given", "answer", "said"),
    [
        (BOARD, RIGHT, "correct: the only solution"),
        (BOARD, "1234341221434312", "wrong: 2 cells, 2 of them clues (marked x)"),
        (BOARD, "1233341221434321", "wrong: 1 cell (marked x)"),
        (BOARD, "2143432112343412", "wrong: 16 cells, 13 of them clues (marked x)"),
        ("." * 16, RIGHT, "keeps the clues and the rules; the board has several solutions"),
        (
            "." * 16,
            "1134" + RIGHT[4:],
            "wrong: 3 cells against clues and rules (marked x); the board has several solutions",
        ),
        (
            "12...." + "3.......4.",
            RIGHT,
            "the board has no solution: its clues contradict each other",
        ),
    ],
)
def test_answers_to_boards_are_judged_by_what_the_solver_finds(
    given: str, answer: str, said: str
) -> None:
    assert one_answer("sudoku", given, digits(answer))[-2] == said


def test_a_board_that_the_solver_gives_up_is_judged_by_its_rules() -> None:
    ((boards, solutions),) = generate(9, (1,), 54, seed=3, min_guesses=2)
    inputs = (boards + BLANK).astype(np.int32)
    counts, found = solve_boards(inputs, deep=1)
    assert counts.tolist() == [-1]
    assert (found == IGNORE).all()
    puzzles = OwnPuzzles("sudoku", inputs, [1], 0)
    puzzles.solutions = counts, found
    text = answered(puzzles, solutions.astype(np.int64) + BLANK, 11).text
    assert "keeps the clues and the rules; how many solutions is unknown" in text


@pytest.mark.parametrize("size", [4, 9])
def test_empty_boards_have_several_solutions(size: int) -> None:
    counts, solutions = solve_boards(np.full((2, size * size), BLANK))
    assert counts.tolist() == [2, 2]
    assert is_solved(solutions - BLANK, size).all()


@pytest.mark.parametrize(
    ("given", "answer", "said"),
    [
        (MAZE, "S #o #ooG", "correct: a shortest path"),
        (MAZE, "So# o# oG", "correct: a shortest path"),
        (MAZE, "Soo o# oG", "wrong: 1 cell changed (marked x)"),
        (MAZE, "So#oo#ooG", "wrong: what is marked is no shortest path"),
        ("S##G", "S##G", "the maze has no solution: no path leads from S to G"),
    ],
)
def test_answers_to_mazes_are_judged_by_their_paths(given: str, answer: str, said: str) -> None:
    assert one_answer("maze", given, tokens(answer).astype(np.int64))[-2] == said


def test_many_answers_become_a_table(tmp_path: Path) -> None:
    several = "." * 16
    lines = [LINE, several, LINE, "12....3.......4.", *[RIGHT] * 20]
    (tmp_path / "boards").write_text("# mine\n" + "\n".join(lines))
    puzzles = own_puzzles(str(tmp_path / "boards"), "sudoku", 16, 0)
    answers = np.tile(digits(RIGHT), (24, 1))
    answers[2, 3] = BLANK
    made = answered(puzzles, answers, 6)
    told = made.text.split("\n")
    assert told[0] == (
        "24 puzzles: 21 correct, 1 wrong, 1 answered with one of several solutions, 1 without a"
        " solution, 20 of them repeated; answers.csv has them all"
    )
    assert told[1] == "line 3:"
    table = list(csv.DictReader(io.StringIO(made.files["answers.csv"])))
    assert [row["line"] for row in table] == [str(number) for number in range(2, 26)]
    assert [row["question"] for row in table] == lines
    assert table[2]["answer"] == "123." + RIGHT[4:]
    assert [row["verdict"] for row in table[:5]] == [
        "correct",
        "one of several solutions",
        "wrong",
        "no solution",
        "correct",
    ]
    assert {row["confidence"] for row in table} == {"88.1%"}
    shown = json.loads(made.files["boards.scene.json"])["examples"]
    assert len(shown) == 8
    assert {one["index"]: one["solved"] for one in shown if one["index"] < 4} == {
        0: True, 1: True, 2: False, 3: False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("sudoku", "1234", "data.puzzle=1234: has 4 cells, not 4 × 4"),
        ("sudoku", "5" + "." * 15, "has 5; cells are 1 to 4, or . for a blank"),
        ("sudoku", "11" + "." * 14, "has 1 twice in row 1; correct it"),
        ("sudoku", "1..." * 2 + "." * 8, "has 1 twice in column 1; correct it"),
        ("sudoku", "1....1" + "." * 10, "has 1 twice in box 1; correct it"),
        ("sudoku", f"{LINE}\n{LINE[1:]}\n{LINE}", ": line 2: has 15 cells, not 4 × 4"),
        ("sudoku", f"{LINE}\n\n{LINE * 2}", ": line 3: has 32 cells, not 4 × 4"),
        ("sudoku", f"{LINE}.\n{LINE}.", ": line 1: has 17 cells, not 4 × 4"),
        ("sudoku", f"{LINE}\n{LINE[:-1]}x", ": line 2: has X; cells are 1 to 4"),
        ("sudoku", f"puzzle,n\n{LINE},1\n{LINE}", ": line 3 has 1 fields, not 2"),
        ("sudoku", "puzzle,n\n", "holds a header and no puzzles"),
        ("sudoku", "", "has 0 cells, not 4 × 4"),
        ("sudoku", "board.txt", "data.puzzle=board.txt: no such file"),
        ("sudoku", "mine/board", "data.puzzle=mine/board: no such file"),
        ("maze", "maze.txt", "data.puzzle=maze.txt: no such file"),
        ("maze", "S..\n...\n", "has 2 rows of 3 cells, not 4 × 4"),
        ("maze", "S" + "." * 15, "has 0 G; a maze has one start S and one goal G"),
        ("maze", "SS" + "." * 13 + "G", "has 2 S; a maze"),
        ("maze", "So" + "." * 13 + "G", "has o; cells are # for a wall"),
        ("maze", "S" + "." * 14 + "G\nS" + "." * 13 + "G", ": line 2: has 15 cells, not 4 × 4"),
        ("maze", "S" + "." * 14 + "G\nS" + "." * 14 + "S", ": line 2: has 2 S"),
        ("", "1", "this data holds no puzzles that can be typed (sudoku, maze)"),
    ],
)
def test_wrong_puzzles_are_named(kind: str, given: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        own_puzzles(given, kind, 16, 0)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_puzzle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give a file of text"):
        read(str(tmp_path))


def test_the_typed_board_of_the_guide_is_that_of_the_readme() -> None:
    """Readers compare the two."""
    shown = (ROOT / "README.md").read_text().partition("puzzle           answer\n")[2]
    drawn = "\n".join(line[:13] for line in shown.split("\n")[:8])
    guide = (ROOT / "data/recursive/README.md").read_text()
    typed = re.findall(r'data\.puzzle="([^"]+)"', guide)
    assert typed
    for one in typed:
        assert read(one, cells=36) == read(drawn, cells=36)


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
    made = opened(PuzzleSource, **given, eval_only=True)
    assert list(made.eval_sets()) == ["puzzle"]
    assert [type(one) for one in made.evaluators("puzzle")] == [Answers, AnswersByStep]
    with pytest.raises(
        ConfigError,
        match=r"^data.puzzle=.*: a trained model answers it; add eval_only=true and checkpoint=",
    ):
        opened(PuzzleSource, **given)
