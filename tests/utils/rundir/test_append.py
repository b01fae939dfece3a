"""Disks that are full: rows are lost, the run is not, and each file that cannot be written is named
once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import status
from tests.utils.rundir.test_directory import opened, written
from tests.utils.rundir.test_status import fill


def test_training_goes_on_beside_a_disk_that_is_really_full(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(small_disk / "x") as run:
        run.log(1, {"loss": 1.0})
        fill(small_disk)
        for step in range(2, 1000):
            run.log(step, {"loss": 1.0, "a longer row": step})
        for step in (5, 10):
            run.write_evaluation(step, "all", {"big": "x" * 100_000})
        run.mark("stopped")
        run.say("half a page " * 200)
        before = [row["step"] for row in written(run.directory)]
        (small_disk / "filler").unlink()
        run.log(1000, {"loss": 1.0})
        run.write_evaluation(15, "all", {"small": "x"})
        run.mark("finished")
    assert [row["step"] for row in written(run.directory)] == [*before, 1000]
    assert before == list(range(1, len(before) + 1))
    assert len(before) < 200
    assert status(run.directory)["state"] == "finished"
    kept = [path.name for path in (run.directory / "evaluations").rglob("*") if path.is_file()]
    assert kept == ["small"]
    said = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    for name in ("metrics.jsonl", "log.txt", "evaluations"):  # each one once
        line = f"{name} cannot be written (No space left on device); training goes on"
        assert said.count(line) == 1
    assert len(said) <= 4
