"""The weights that this repository ships: whole, from no path of a machine, and able to answer."""

import csv
import json
from pathlib import Path

import pytest

from data.recursive.maze import generate, generate_unique
from data.recursive.puzzle_text import characters
from tests.bench.results import CLAIMS, SUDOKU, WEIGHTS
from tests.ranks import ROOT
from tests.runs import train
from utils.checkpoint import tools

HARD = "2.3..8....1.3.5...........95......749.....6....49....84.51...9...8.3...61..52...."
BOARDS = {
    "demo": "41.3.5.23.4...4..63.........63....5.",
    "maze_hard": characters("maze", generate(30, 110, 0, 0)[0][0]),
    "maze_unique": characters("maze", generate_unique(30, 101, 0, 0)[0][0]),
    **dict.fromkeys(SUDOKU, HARD),
}
FOLDERS = sorted(path.parent.name for path in WEIGHTS.glob("*/meta.json"))


@pytest.mark.parametrize("name", FOLDERS)
def test_each_is_whole_small_and_says_where_it_is_from(name: str) -> None:
    assert "whole" in tools.verify(str(WEIGHTS / name))
    text = (WEIGHTS / name / "meta.json").read_text()
    assert '"/' not in text, "a path of the machine where it was trained"
    meta = json.loads(text)
    assert "uncommitted changes: no" in meta["code"]
    assert meta["results"]
    assert meta["data"]
    assert f"[`{name}`]({name})" in (WEIGHTS / "README.md").read_text()
    assert name in {claim.weights for claim in CLAIMS} | {"tms_target"}  # which tms_5_2 decomposes


def test_all_are_small() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4 << 20


@pytest.mark.parametrize("name", BOARDS)
def test_they_answer_a_board_without_the_data(name: str, tmp_path: Path) -> None:
    (tmp_path / "board").write_text(BOARDS[name])
    asked = f"checkpoint={ROOT}/weights/{name}", f"data.puzzle={tmp_path}/board"
    run = train(tmp_path / "run", "eval_only=true", *asked)
    (file,) = run.directory.glob("evaluations/*/puzzle/answers.csv")
    with file.open() as rows:
        assert [row["verdict"] for row in csv.DictReader(rows)] == ["correct"]


def test_they_are_a_decomposition_of_a_net_beside_them(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "eval_only=true", "checkpoint=weights/tms_5_2")
    assert "known answer: found" in run.stdout
