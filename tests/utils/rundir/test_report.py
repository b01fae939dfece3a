"""Files that evaluations leave in the run directory, by step and set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.utils.rundir.test_directory import opened
from tests.utils.rundir.test_status import fill

FILES = {"confusion.svg": "<svg/>", "table.csv": "a,b\n", "raw.bin": b"\xff"}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_files_lie_by_step_and_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as run:
        run.write_evaluation(5, "all", FILES)
        run.write_evaluation(5, "a/b", {"../x.svg": "<svg/>"})
        run.write_evaluation(10, "..", {"/etc/x": "x"})
        # again, by a run that was continued
        run.write_evaluation(5, "all", {"confusion.svg": "<svg>2</svg>"})
        assert not run.earlier_files(10, "all", "table.csv", 2), (
            "whoever left that, this run has evaluated nothing"
        )
        run.log(5, {"eval/x": 1.0})
        assert run.earlier_files(10, "all", "table.csv", 2) == [
            tmp_path / "evaluations" / "step_5" / "all" / "table.csv"
        ]
        assert not [
            *run.earlier_files(5, "all", "table.csv", 2),
            *run.earlier_files(10, "all", "table.csv", 0),
        ]
    assert tree(tmp_path / "evaluations") == {
        "step_5/all/confusion.svg": b"<svg>2</svg>",
        "step_5/all/table.csv": b"a,b\n",
        "step_5/all/raw.bin": b"\xff",
        "step_5/a%2Fb/..%2Fx.svg": b"<svg/>",
        "step_10/%../%2Fetc%2Fx": b"x",
    }
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_said_once_and_ends_nothing(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(small_disk / "x") as run:
        fill(small_disk)
        for step in (5, 10):
            run.write_evaluation(step, "all", {"big": "x" * 100_000})
        said = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluations")
        ]
        assert said == ["evaluations cannot be written (No space left on device); training goes on"]
        (small_disk / "filler").unlink()
        run.write_evaluation(15, "all", FILES)
    assert sorted(tree(small_disk / "x" / "evaluations")) == [
        f"step_15/all/{name}" for name in ("confusion.svg", "raw.bin", "table.csv")
    ]
