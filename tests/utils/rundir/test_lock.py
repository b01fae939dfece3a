"""The lock of a run directory has one holder; tests/test_disk_and_wandb_failures.py kills some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT
from utils.rundir.folders import lock, unlock

# Whoever has the lock is alone: another one that had it too would find its marker.
RACER = """
import os, sys, time
from pathlib import Path
from utils.rundir.folders import lock, unlock
run, marker, wins, losses = Path(sys.argv[1]), Path(sys.argv[2]), 0, 0
while not marker.with_name("go").exists():
    time.sleep(0.001)
until = time.monotonic() + 1.0
while time.monotonic() < until:
    held = lock(run)
    if held is not None:
        open(marker, "x").close()
        os.unlink(marker)
        wins += 1
    else:
        losses += 1
    unlock(held)
print(wins, losses)
"""


@pytest.mark.slow
def test_of_many_that_start_at_once_one_has_it(tmp_path: Path) -> None:
    """Also while the file is removed and made again."""
    (tmp_path / "marks").mkdir()
    command = [sys.executable, "-c", RACER, f"{tmp_path}/runs/demo/x", f"{tmp_path}/marks/held"]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    (tmp_path / "marks" / "go").touch()
    counts = [tuple(map(int, racer.communicate(timeout=60)[0].split())) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(won for won, _ in counts) > 50
    assert sum(lost for _, lost in counts) > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["go"], (
        "nothing is left behind"
    )


def test_it_stays_where_it_is_when_the_directory_moves(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    held = lock(tmp_path / "x")
    assert held is not None
    (tmp_path / "x").rename(tmp_path / "x.old-1")
    unlock(lock(tmp_path / "x"))  # which is not its to give back
    assert lock(tmp_path / "x") is None
    unlock(held)
    other = lock(tmp_path / "x")
    assert other is not None
    unlock(held)  # a second time: it is another's by now
    assert lock(tmp_path / "x") is None
    unlock(other)
    assert os.listdir(tmp_path) == ["x.old-1"]
