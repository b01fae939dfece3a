"""Datasets of the user's own: a test file alone, and questions without answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.build import maze as build_maze
from data.build import sudoku as build_sudoku
from data.recursive.sudoku import generate
from tests.making import make_source
from utils.errors import ConfigError

COMMON = {"seed": 0, "shards": 1, "global_batch_size": 2, "epochs": 4}


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


def test_repeated_boards_are_told(
    tmp_path: Path, boards: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    again = [*boards[:2], boards[0], boards[0]]
    built(tmp_path, train=published(again), test=published(boards))
    said = capsys.readouterr().out
    assert "6x6; note: 2 train puzzles come again in their set; note: 2 test puzzles" in said
    assert said.endswith("are in the training set, too\n")
