"""Datasets of the user's own: a test file alone, and questions without answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.build import maze as build_maze
from data.build import sudoku as build_sudoku
from data.recursive.sudoku import generate, search, to_masks
from tests.data.recursive.test_sudoku import hashes
from tests.making import make_source
from utils.errors import ConfigError

COMMON = {"seed": 0, "shards": 1, "global_batch_size": 2, "epochs": 4}
MAZES = [("S #  #  G", "S #o #ooG"), ("S    #  G", "S  o #ooG")]


@pytest.fixture(scope="module")
def boards() -> list[tuple[str, str]]:
    ((puzzles, answers),) = generate(6, (4,), 20, seed=0)
    return [
        ("".join("." if not cell else str(cell) for cell in puzzle), "".join(map(str, answer)))
        for puzzle, answer in zip(puzzles, answers, strict=True)
    ]


def built(folder: Path, *options: object, maze: bool = False, **files: str) -> Path:
    """The dataset made of these files."""
    (folder / "in").mkdir(parents=True)
    for name, text in files.items():
        (folder / "in" / f"{name}.csv").write_text(text, newline="")
    build = build_maze if maze else build_sudoku
    given = ["--input-dir", folder / "in", "--output-dir", folder / "out", *options]
    assert build.main([str(one) for one in given]) == 0
    return folder / "out"


def labels(dataset: Path, split: str = "test") -> list[str]:
    return ["".join(map(str, row - 1)) for row in np.load(dataset / split / "all__labels.npy")]


def published(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["source,question,answer,rating", *(f"me,{q},{a},3" for q, a in rows)]) + "\n"


def test_a_test_file_alone_can_be_evaluated(
    tmp_path: Path, boards: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = built(tmp_path, test=published(boards))
    assert capsys.readouterr().out == f"{out}: 4 test boards, 6x6\n"
    whole = built(tmp_path / "both", train=published(boards[:1]), test=published(boards[1:]))
    for given in (
        {"data_path": str(out)},
        {"data_paths": [str(out)]},
        {"data_paths_test": [str(out)]},
        {"data_path": str(tmp_path), "data_paths_test": [str(out)]},
    ):
        source = make_source("puzzles", **COMMON, **given, eval_only=True)
        assert "generated" not in source.spec.name
        assert (source.spec.vocab_size, source.spec.seq_len, source.spec.table_rows) == (8, 36, 1)
        assert source.train_batch(0, 0)["inputs"].shape == (2, 36)  # a look at what comes
        (examples,) = source.eval_sets().values()
        assert len(examples) == 4
        assert ["".join(map(str, row)) for row in examples.read(np.arange(4))["labels"] - 1] == [
            answer for _, answer in boards
        ]
        with pytest.raises(ConfigError):
            make_source("puzzles", **COMMON, **given)
    # where there is a training split, it counts
    source = make_source(
        "puzzles", **COMMON, data_path=str(whole), data_paths_test=[str(out)], eval_only=True
    )
    assert len(source.eval_sets()["all"]) == 4
    assert source.spec == make_source("puzzles", **COMMON, data_path=str(whole)).spec


def test_a_test_dataset_replaces_another_one(tmp_path: Path, boards: list[tuple[str, str]]) -> None:
    out = built(tmp_path, test=published(boards))
    (tmp_path / "in" / "test.csv").write_text(published(boards[:2]))
    assert build_sudoku.main(["--input-dir", f"{tmp_path}/in", "--output-dir", str(out)]) == 0
    assert len(labels(out)) == 2


@pytest.mark.parametrize(
    "written",
    [
        "source,question,answer,rating\nme,{0},,\nme,{1},{a1},\n\nme,{2},,7\nme,{3},,\n",
        "{0}\n{1}\n\n{2}\n{3}",
        "\ufeffquestion,answer\r\n{0},\r\n{1},{a1}\r\n{2},\r\n\r\n{3},\r\n",
        'question,answer\n"{0}","{a0}"\n"{1}",""\n{2},\n{3},\n',
    ],
)
def test_questions_without_answers_are_solved(
    tmp_path: Path, boards: list[tuple[str, str]], written: str
) -> None:
    answers = {f"a{number}": answer for number, (_, answer) in enumerate(boards)}
    out = built(tmp_path, test=written.format(*(question for question, _ in boards), **answers))
    assert labels(out) == [answer for _, answer in boards]
    assert hashes(out) == hashes(built(tmp_path / "known", test=published(boards)))


def test_mazes_are_solved_too(tmp_path: Path) -> None:
    given = published([(question, "") for question, _ in MAZES])
    out = built(tmp_path, maze=True, test=given)
    assert hashes(out) == hashes(built(tmp_path / "known", maze=True, test=published(MAZES)))


def test_large_boards_are_solved(tmp_path: Path) -> None:
    ((puzzles, answers),) = generate(16, (3,), 100, seed=0)
    assert (search(to_masks(puzzles, 16), 16, limit=2).counts == 1).all()
    text = "\n".join("".join(".123456789ABCDEFG"[cell] for cell in row) for row in puzzles)
    out = built(tmp_path, test=text + "\n")
    assert (np.load(out / "test" / "all__labels.npy") == answers + 1).all()


def test_some_training_boards_are_held_out(
    tmp_path: Path, boards: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = built(tmp_path, "--held-out", 1, "--num-aug", 2, train=published(boards))
    assert "9 training examples of 3 boards, 1 test boards, 6x6\n" in capsys.readouterr().out
    assert sorted(labels(out) + labels(out, "train")[::3]) == sorted(one for _, one in boards)


def test_repeated_boards_are_told(
    tmp_path: Path, boards: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    again = [*boards[:2], boards[0], boards[0]]
    built(tmp_path, train=published(again), test=published(boards))
    said = capsys.readouterr().out
    assert "6x6; note: 2 train puzzles come again in their set; note: 2 test puzzles" in said
    assert said.endswith("are in the training set, too\n")


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("question\n{0}\n" + "." * 36 + "\n", (), "line 3 has no answer, and several solutions"),
        ("question\n{0}\n11" + "." * 34 + "\n", (), "line 3 has no answer, and no solution"),
        ("question\n{0}\n{0}.\n", (), "line 3 has 37 and 0 cells, not 36"),
        ("question\n{0}\n", ("--min-difficulty", 1), "line 2 has no rating, which --min-diff"),
        ("question\n", (), "holds no boards"),
        ("", (), "holds no boards"),
        ("quest\n{0}\n", (), "line 1 has 5 and 0 cells"),
        ("question\n{0}\n", ("--held-out", 1), "--held-out 1: there is no train.csv"),
        ("question\n{0}\n", ("--subsample-size", 1), "--subsample-size 1: there is no train.csv"),
    ],
)
def test_what_cannot_be_answered_is_named(
    tmp_path: Path,
    boards: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
    text: str,
    options: tuple[object, ...],
    problem: str,
) -> None:
    (tmp_path / "test.csv").write_text(text.format(*(question for question, _ in boards)))
    given = ["--input-dir", tmp_path, "--output-dir", tmp_path / "out", *options]
    assert build_sudoku.main([str(one) for one in given]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_a_maze_without_a_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.csv").write_text("question\nS##G\n")
    given = ["--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    assert build_maze.main(given) == 2
    assert "line 2 has no answer, and no solution" in capsys.readouterr().err
