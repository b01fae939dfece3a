"""Run by test_writer.py: a writer that is killed again and again."""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.utils.checkpoint.helpers import META, alone, groups, held, value_of
from utils.checkpoint import reader, writer
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist


def forked(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Do the work in a child and perhaps kill it; the signal it died of."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert not os.WEXITSTATUS(status), "the child failed by itself"
    return os.WTERMSIG(status)


def save_for_ever(directory: Path, tell: int, value: int) -> None:
    """Every step twice, the second time over the first, as a run does that went back to an older
    step.
    """
    one = Writer(directory, Dist(), print, keep=2)
    while True:
        value += 1
        one.save(value // 2, held(groups(float(value), rows=5000)), {**META, "value": value})
        assert one.wait() == ""
        os.write(tell, f"{value}\n".encode())


def killed_at_random(folder: Path) -> dict[str, int]:
    """After each kill the newest checkpoint is whole, and no older than the last save that was
    reported done.
    """
    directory, rng = folder / "random", random.Random(5)
    hear, tell = os.pipe()
    os.set_blocking(hear, False)
    value, dirty, kills, limit_s = 1, 0, 0, 0.06
    while kills < 30 or (kills < 300 and (dirty < 8 or value < 30)):
        before, kills = value, kills + 1
        forked(
            lambda start=value: save_for_ever(directory, tell, start),
            kill_after_s=rng.uniform(0.0, limit_s),
        )
        dirty += any(directory.glob(".*"))
        try:
            done = max(value, *map(int, os.read(hear, 1 << 16).split()), 0)
        except BlockingIOError:
            done = value
        said: list[str] = []
        newest = reader.newest_whole(directory, said.append)
        assert not said, said
        assert newest is not None or done == 1
        if newest is not None:
            value = int(value_of(newest))
            assert value in (done, done + 1), (value, done)
            # it moves last: not there yet when the very first save was cut off just before
            if (directory / "latest").exists():
                assert value_of(directory) in (value, value - 1, value - 2)
        limit_s *= 1.1 if value == before else 1.0  # a busy machine needs longer for a save
    return {"value": value, "dirty": dirty}


def killed_everywhere(folder: Path) -> dict[str, int]:
    """The process dies before each change that saves of an old and of a new step make to the file
    system.
    """
    deaths = {}
    for owner, name in (
        (Path, "mkdir"),
        (Path, "rename"),
        (os, "replace"),
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (writer, "write"),
    ):
        at = 0
        while _dies(folder / f"{name}-{at}", owner, name, at):
            at += 1
        deaths[name] = at
    return deaths


def _dies(directory: Path, owner: Any, name: str, at: int) -> bool:
    for step, value in ((4, 1.0), (5, 1.0)):
        alone(directory, step, value)

    def work() -> None:
        real, calls = getattr(owner, name), iter(range(1000))

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, deadly)
        alone(directory, 5, 2.0, keep=2)
        alone(directory, 6, 3.0, keep=1, best=True)

    died = forked(work) != 0
    said: list[str] = []
    newest = reader.newest_whole(directory, said.append)
    assert newest is not None
    assert not said, said
    value, latest = value_of(newest), value_of(directory)
    assert (newest.name, value) in {("step_5", 1.0), ("step_5", 2.0), ("step_6", 3.0)}
    assert latest in ({value, 2.0} if value == 3.0 else {value}), "latest moves last"
    assert died or latest == 3.0
    # and the next save is not disturbed by what lies about
    alone(directory, 6, 4.0, keep=1, best=True)
    assert sorted(entry.name for entry in directory.iterdir()) == ["best", "latest", "step_6"]
    assert value_of(directory) == 4.0
    shutil.rmtree(directory)
    return died


if __name__ == "__main__":
    function = {"random": killed_at_random, "everywhere": killed_everywhere}[sys.argv[1]]
    print(json.dumps(function(Path(sys.argv[2]))))
