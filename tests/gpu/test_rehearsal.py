"""`make gpu` where there is no GPU: the same code, tiny."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.recursive.puzzle_files import read_split
from tests.gpu import parts
from tests.ranks import ROOT


@pytest.mark.slow
def test_all_parts_are_rehearsed_and_a_rerun_does_what_is_missing(tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def rehearse(**settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.gpu"]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=env | settings,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = rehearse()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no CUDA device is here")
    text = (tmp_path / "gpu-rehearsal.md").read_text()
    assert text.count("| passed |") == 5
    assert "| TRM 5M, token mixing, eager | 73," in text
    assert "aten::mm" in text
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| 0.")] == [
        "5",
        "10",
    ], text
    again = rehearse(PART="12")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "eager …" in done.stdout
    assert "eager …" not in again.stdout
    assert (tmp_path / "gpu-rehearsal.md").read_text() == text, "nothing was measured again"


def test_of_a_given_dataset_few_boards_are_held_out(
    sudoku_9x9: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", str(sudoku_9x9))
    monkeypatch.setattr(parts, "HELD_OUT", 3)
    keys, said = parts.dataset(tmp_path)
    assert keys[1:] == [f"data_paths=[{sudoku_9x9}]", f"data_paths_test=[{tmp_path}/part]"]
    assert "the first 3" in said
    given, cut = (
        read_split("", folder, "test").sets["all"] for folder in (sudoku_9x9, tmp_path / "part")
    )
    assert len(cut.inputs) == 3
    assert (cut.labels == given.labels[:3]).all()


def test_a_way_that_does_not_exist_yet_is_a_line_of_the_table() -> None:
    assert parts.measured(["compile=turbo"], 60).startswith("error: compile=turbo: must be")
