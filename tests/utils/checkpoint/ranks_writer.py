"""Processes of the writer's tests: ranks that save together and fail apart, and a writer that is
killed again and again.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.utils.checkpoint.helpers import META, SHARDS, Groups, alone, groups, value_of
from utils.checkpoint import reader, writer
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks import distributed
from utils.ranks.distributed import Dist

write = writer.write


def held(dist: Dist, value: float) -> Groups:
    return groups(value, owned=dist.owned_shards(SHARDS))


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def slowly(*args: Any, **kwargs: Any) -> Any:
    time.sleep(0.5)
    return write(*args, **kwargs)


@dataclass
class Scene:
    """One rank's view of a row of saves."""

    dist: Dist
    folder: Path
    said: list[str]

    def writer(self, name: str, elsewhere: bool = False) -> Writer:
        dist = replace(self.dist, timeout_s=0.2) if name == "slow" else self.dist
        folder = self.folder / ("elsewhere" if elsewhere else name)
        folder.mkdir(exist_ok=True)
        return Writer(folder, dist, self.said.append)

    def save(self, one: Writer, step: int) -> list[Any]:
        """How a save went, as this rank sees it."""
        one.save(step, held(self.dist, float(step)), {**META, "value": float(step)})
        return [one.wait(), one.failures]


def save_together(folder: Path) -> None:
    dist = distributed.start(device="cpu", timeout_s=30)
    scene = Scene(dist, folder, [])
    result: dict[str, Any] = {}
    keys = dist.store.num_keys() if dist.store is not None else 0
    first = scene.writer("good")
    result["good"] = [scene.save(first, step) for step in (1, 2, 3)]
    first.close()
    second = scene.writer("good")  # as the next job of a multirun
    if dist.rank == 1:
        writer.write = full_disk
    result["full"] = [scene.save(second, 4), scene.save(second, 5)]
    writer.write = write
    result["again"] = scene.save(second, 6)
    second.close()
    writer.DISK_LAG_S = 0.3
    try:
        scene.writer("apart", elsewhere=dist.rank == 2)
    except ConfigError as error:
        result["apart"] = str(error)
    slow = scene.writer("slow")
    if dist.rank == 0:
        writer.write = slowly
    result["slow"] = scene.save(slow, 1)
    writer.write = write
    slow.close()
    hurried = scene.writer("hurried")
    started = time.monotonic()
    if dist.rank != 2:
        hurried.save(1, held(dist, 1.0), {})
    hurried.close(patience_s=0.2)  # as after an error, when a rank may be dead
    result["hurried"] = [hurried.wait() != "", time.monotonic() - started]
    dist.barrier()
    result["keys"] = dist.store.num_keys() - keys if dist.store is not None else 0
    result["said"] = scene.said
    (folder / f"{dist.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    distributed.stop()


def save_once(folder: Path) -> None:
    """One save by so many ranks, to be compared between numbers of ranks."""
    dist = distributed.start(device="cpu", timeout_s=30)
    one = Writer(folder / "checkpoints", dist, print)
    one.save(7, held(dist, 7.0), {**META, "value": 7.0})
    assert one.wait() == ""
    one.close()
    dist.barrier()
    distributed.stop()


# --- a writer that is killed


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
        one.save(value // 2, groups(float(value), rows=5000), {**META, "value": value})
        assert one.wait() == ""
        os.write(tell, f"{value}\n".encode())


def killed_at_random(folder: Path, least: int = 30, most: int = 300) -> None:
    """After each kill the newest checkpoint is whole, and no older than the last save that was
    reported done.
    """
    directory, rng = folder / "random", random.Random(5)
    hear, tell = os.pipe()
    os.set_blocking(hear, False)
    value, dirty, kills, limit_s = 1, 0, 0, 0.06
    while kills < least or (kills < most and (dirty < 8 or value < 30)):
        before, kills = value, kills + 1
        forked(
            lambda start=value: save_for_ever(directory, tell, start),
            kill_after_s=rng.uniform(0.0, limit_s),
        )
        dirty += any(entry.name.startswith(".") for entry in directory.glob(".*"))
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
    (folder / "random.json").write_text(json.dumps({"value": value, "dirty": dirty}))


def killed_everywhere(folder: Path) -> None:
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
    (folder / "everywhere.json").write_text(json.dumps(deaths))


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
    {
        function.__name__: function
        for function in (save_together, save_once, killed_at_random, killed_everywhere)
    }[sys.argv[1]](Path(sys.argv[2]))
