"""Pipes in place of files never hang a start, and no path makes a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.build.rows import read_csv
from data.recursive.own_puzzle import OwnPuzzles
from data.recursive.puzzle_files import read_split
from tests.making import make_source
from utils.errors import ConfigError

LENGTH = {"seed": 0, "shards": 1, "global_batch_size": 8, "epochs": 1}

OPENED: list[tuple[str, Callable[[Path], object]]] = [
    (
        "train-images-idx3-ubyte",
        lambda folder: make_source("mnist", **LENGTH, data_path=str(folder)),
    ),
    (
        "train-images-idx3-ubyte.gz",
        lambda folder: make_source("mnist", **LENGTH, data_path=str(folder)),
    ),
    ("puzzle.txt", lambda folder: OwnPuzzles("puzzle.txt", "maze", 9, 0)),
    ("train.csv", lambda folder: next(read_csv(folder / "train.csv"))),
    ("train/dataset.json", lambda folder: read_split("data_path=x", folder, "train")),
    ("dataset.json", lambda folder: make_source("tokens", **LENGTH, data_path=str(folder))),
    (
        "train.bin",
        lambda folder: make_source("tokens", **LENGTH, data_path=str(folder), vocab_size=9),
    ),
]


@pytest.mark.parametrize(("name", "open_in"), OPENED, ids=[name for name, _ in OPENED])
def test_a_pipe_is_refused_by_name(
    name: str, open_in: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=r"is a pipe|not a plain file") as error:
        open_in(tmp_path)
    assert Path(name).name in str(error.value)


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("mnist", {}),
        ("puzzles", {}),
        ("qa_text", {}),
        ("stream", {"max_steps": 3, "epochs": None}),
        ("tokens", {}),
    ],
)
def test_a_path_that_no_file_can_have_is_one_line(source: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^data_path=xxx"):
        make_source(source, **LENGTH | more, data_path="x" * 5000)
