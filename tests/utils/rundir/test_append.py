"""Disks that are full: rows are lost, the run is not, and each file that cannot be written is named
once.
"""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.utils.rundir.test_directory import opened, written
from tests.utils.rundir.test_progress import Clock
from tests.utils.rundir.test_status import HOLDER, fill, state
from utils.errors import ConfigError

FAILED = "metrics.jsonl cannot be written (No space left on device); training goes on\n"
WORKS = "metrics.jsonl can be written again\n"


class FullDisk:
    """A file that takes half of a line and then no more."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.full, self.dead = file, True, False

    def write(self, data: bytes) -> int:
        if not self.full:
            return self.file.write(data)
        if len(data) > 4:
            return self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, length: int) -> int:
        if self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.file.truncate(length)

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()

    @property
    def closed(self) -> bool:
        return self.file.closed


def test_a_full_disk_costs_rows_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("utils.rundir.directory.time.monotonic", clock)
    with opened(tmp_path) as run:
        run.log(1, {"loss": 1.0})
        assert run._metrics is not None
        run._metrics._file = disk = FullDisk(run._metrics._file)  # type: ignore[assignment,arg-type]
        for step in (2, 3):
            run.log(step, {"loss": 1.0})
            assert [row["step"] for row in written(tmp_path)] == [1]  # half a line is taken back
            clock.now += 100
        assert capsys.readouterr().out == FAILED
        disk.full = False
        run.log(4, {"loss": 1.0})
        assert capsys.readouterr().out == WORKS
        for said in (FAILED + WORKS, ""):  # a disk that wavers is no news for a while
            disk.full = True
            run.log(5, {"loss": 1.0})
            disk.full = False
            run.log(6, {"loss": 1.0})
            assert capsys.readouterr().out == said
        clock.now += 100
        disk.full = disk.dead = True
        run.log(9, {"loss": 1.0})
        run.log(10, {"loss": 1.0})
        assert capsys.readouterr().out == FAILED
        disk.full = disk.dead = False
        run.log(11, {"loss": 1.0})
    assert [row["step"] for row in written(tmp_path)] == [1, 4, 6, 6, 11]
    assert (tmp_path / "log.txt").read_text().count("cannot be written") == 3


def test_training_goes_on_beside_a_disk_that_is_really_full(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(small_disk / "x") as run:
        run.log(1, {"loss": 1.0})
        fill(small_disk)
        for step in range(2, 1000):
            run.log(step, {"loss": 1.0, "a longer row": step})
        run.mark("stopped")
        run.say("half a page " * 200)
        before = [row["step"] for row in written(run.directory)]
        (small_disk / "filler").unlink()
        run.log(1000, {"loss": 1.0})
        run.mark("finished")
    assert [row["step"] for row in written(run.directory)] == [*before, 1000]
    assert before == list(range(1, len(before) + 1))
    assert len(before) < 200
    assert state(run.directory)["state"] == "finished"
    said = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    for name in ("metrics.jsonl", "log.txt"):  # each one once; status.json fits into its own bytes
        assert (
            said.count(f"{name} cannot be written (No space left on device); training goes on") == 1
        )
        assert said.count(f"{name} can be written again") == 1
    assert len(said) == 4


def test_a_disk_full_at_the_start_is_one_line(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(
        ConfigError,
        match=r"^checkpoint_path=.*x: cannot be (made|written) \(No space left on device\)",
    ):
        opened(small_disk / "x")


def test_output_to_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    code = HOLDER.replace(
        'print("begun", flush=True); sys.stdin.read()',
        'run.say("a" * 9999); run.progress(1, 1, 0.1, "a", 0.1, 1.0); run.close()',
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code + "import os; os._exit(7)", str(tmp_path)],
            cwd=ROOT,
            stdout=full,
            check=False,
            timeout=60,
        )
    assert done.returncode == 7
