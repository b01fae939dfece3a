"""The lock of a run directory: one holder among real processes, however they come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import ROOT, until
from utils.rundir.folders import Lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from utils.rundir.folders import Lock
assert (held := Lock(Path(sys.argv[1]))).acquire()
child = os.fork() if "fork" in sys.argv[2] else 0
if "fork" in sys.argv[2] and child == 0:
    if "release" in sys.argv[2]:
        held.release()  # not the child's to give back
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "exec":
    child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
print(child, flush=True)
sys.stdin.read()
"""
# Whoever has the lock is alone: another one that had it too would find its marker.
RACER = """
import os, sys, time
from pathlib import Path
from utils.rundir.folders import Lock
run, marker, wins, losses = Path(sys.argv[1]), Path(sys.argv[2]), 0, 0
while not marker.with_name("go").exists():
    time.sleep(0.001)
until = time.monotonic() + 1.0
while time.monotonic() < until:
    lock = Lock(run)
    if lock.acquire():
        open(marker, "x").close()
        os.unlink(marker)
        wins += 1
    else:
        losses += 1
    lock.release()
print(wins, losses)
"""


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def holder(run: Path, kind: str) -> Iterator[tuple[int, int]]:
    """A process that holds the lock, and a child of it that may outlive it."""
    process = started(HOLDER, run, kind)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process.pid, child
    finally:
        process.kill()
        process.wait()
        if child:
            os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_of_many_that_start_at_once_one_has_it(tmp_path: Path) -> None:
    """Also while the file and the folders that were made for it are removed and made again."""
    (tmp_path / "marks").mkdir()
    racers = [
        started(RACER, tmp_path / "runs" / "demo" / "x", tmp_path / "marks" / "held")
        for _ in range(6)
    ]
    (tmp_path / "marks" / "go").touch()
    counts = [tuple(map(int, racer.communicate(timeout=60)[0].split())) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(won for won, _ in counts) > 50
    assert sum(lost for _, lost in counts) > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["go"], (
        "nothing is left behind"
    )


@pytest.mark.parametrize("kind", ["fork and release", "exec"])
def test_it_is_free_as_soon_as_its_holder_is_dead(kind: str, tmp_path: Path) -> None:
    with holder(tmp_path / "x", kind) as (pid, child):
        mine = Lock(tmp_path / "x")
        if "release" in kind:
            time.sleep(0.1)
        assert not mine.acquire()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert child == 0 or Path(f"/proc/{child}").exists(), "its child lives on"
        assert until(mine.acquire), "a child closes the file as it begins"
        mine.release()
    assert os.listdir(tmp_path) == []


def test_it_stays_where_it_is_when_the_directory_moves(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    held, other = Lock(tmp_path / "x"), Lock(tmp_path / "x")
    assert held.acquire()
    assert held.acquire()
    (tmp_path / "x").rename(tmp_path / "x.old-1")
    assert not other.acquire()
    (tmp_path / "x").mkdir()
    other.release()  # which is not its to give back
    assert not other.acquire()
    held.release()
    assert other.acquire()
    assert not held.acquire()
    other.release()
    assert sorted(os.listdir(tmp_path)) == ["x", "x.old-1"]
