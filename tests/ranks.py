"""Run a module or script as N real ranks on this machine, as a launcher would, and collect what they say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0  # how long ranks may outlive the first one that failed
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MV2_", "MPI_", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class Completed:
    """One rank's end. A rank that had to be killed has a negative return code and says so in stderr."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    note: str = ""


def run_ranks(n: int, args: Sequence[str], timeout: float = 60, env: Mapping[str, str] | None = None) -> list[Completed]:
    """Run `python *args` (`["-m", "module", ...]` or `["script.py", ...]`) as ranks 0..n-1 from the repository's root."""
    common = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONUNBUFFERED": "1", **(env or {})}
    children: list[_Child] = []
    with _ended_by_sigterm():
        try:
            for rank in range(n):
                children.append(_start(args, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            _wait(children, timeout)
        finally:
            for child in children:
                _kill(child, "killed by the test")
    return [_completed(rank, child) for rank, child in enumerate(children)]


def succeeded(ranks: Sequence[Completed]) -> Sequence[Completed]:
    """The same, after asserting that every rank ended well; the message shows what each one said."""
    failed = [f"--- rank {r.rank} ended with {r.returncode}\n{r.stdout[-2000:]}\n{r.stderr[-4000:]}" for r in ranks if r.returncode]
    assert not failed, "\n".join(failed)
    return ranks


def until(true: Callable[[], bool], within: float = 3) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + within
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A program that is asked to end takes its ranks along: they are in sessions of their own, where nobody else would ask them."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start(args: Sequence[str], env: Mapping[str, str]) -> _Child:
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the rank runs)
    # Its own session: killing a rank takes its loader workers along, and nobody else.
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, env=dict(env), stdout=out, stderr=err, start_new_session=True)
    return _Child(process, out, err)


def _wait(children: Sequence[_Child], timeout: float) -> None:
    deadline, reason = time.monotonic() + timeout, f"killed after {timeout:g} s"
    while any(child.process.poll() is None for child in children):
        if any(child.process.poll() for child in children) and time.monotonic() + GRACE_S < deadline:
            deadline, reason = time.monotonic() + GRACE_S, f"killed: still running {GRACE_S:g} s after another rank had failed"
        if time.monotonic() > deadline:
            for child in children:
                _kill(child, reason)
            return
        time.sleep(0.02)


def _kill(child: _Child, note: str) -> None:
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.note = f"\n[{note}]"


def _completed(rank: int, child: _Child) -> Completed:
    texts = []
    for stream in (child.stdout, child.stderr):
        stream.seek(0)
        texts.append(stream.read().decode(errors="replace"))
        stream.close()
    return Completed(rank, child.process.returncode, texts[0], texts[1] + child.note)
