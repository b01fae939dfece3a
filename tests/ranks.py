"""Run a module or script as N real ranks on this machine, as a launcher would, and collect what
they say.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0  # how long ranks may outlive the first one that failed
LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MV2_",
    "MPI_",
    "SLURM_",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
)


def words(line: str) -> list[str]:
    """The arguments of a command line."""
    return line.split()


def clean_env(**more: str) -> dict[str, str]:
    """Returns this environment without the numbers that a launcher gives, for one thread each."""
    numbers = (*LAUNCHER_PREFIXES, "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(numbers)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run_code(code: str, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs `python -c CODE` in the repository's root and returns what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=check,
    )


def started(
    command: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process that a test disturbs, in a separate session; its output is kept."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@dataclass(frozen=True)
class Completed:
    """One rank's end. A rank that had to be killed has a negative return code and says so in
    stderr.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str


@dataclass
class _Rank:
    process: Any  # as `subprocess.Popen`
    stdout: IO[bytes]
    stderr: IO[bytes]
    note: str = ""


forks: Any = None  # in tests, the `Forks` of tests/forks.py; what measures starts its own


def run_ranks(
    n: int,
    args: Sequence[str],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[Completed]:
    """Run `python *args` (`["-m", "module", ...]` or `["script.py", ...]`) as ranks 0..n-1."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run_as(numbered(n, **place, PYTHONUNBUFFERED="1", **(env or {})), args, timeout, cwd)


def numbered(n: int, **more: str) -> list[dict[str, str]]:
    """Returns an environment for each of n ranks on this host."""
    common = clean_env(WORLD_SIZE=str(n), **more)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def run_module(
    n: int, module: str, *arguments: str, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[Completed]:
    """Runs a `ranks_*.py` of the tests on n ranks, such as tests.optim.sync.ranks_allreduce."""
    return run_ranks(n, ["-m", module, *arguments], timeout, env)


def run_line(
    arguments: Sequence[str],
    cwd: Path,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    limit_s: float = 60,
) -> list[Completed]:
    """Run pretrain.py as users do in a folder of theirs: where there is one process, nothing tells
    it that it is a rank.
    """
    if ranks > 1:
        return run_ranks(ranks, ["pretrain.py", *arguments], limit_s, env, cwd)
    return run_as([clean_env(**(env or {}))], ["pretrain.py", *arguments], limit_s, cwd)


def run_as(
    envs: Sequence[Mapping[str, str]], args: Sequence[str], timeout: float, cwd: Path = ROOT
) -> list[Completed]:
    """A process for each environment."""
    if args[0].endswith(".py"):
        args = [str(ROOT / args[0]), *args[1:]]
    # CUDA and forks do not agree
    if forks is not None and args[0] != "-c" and "device=cuda" not in args:
        return forks.run(args, envs, cwd, timeout)
    return attend([partial(_start, args, cwd, env) for env in envs], timeout)


def attend(
    starts: Sequence[Callable[[IO[bytes], IO[bytes]], Any]], timeout: float
) -> list[Completed]:
    """Start ranks and wait for them; who is late is killed."""
    ranks: list[_Rank] = []
    try:
        for start in starts:
            # open as long as the rank runs
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            ranks.append(_Rank(start(out, err), out, err))
        _wait(ranks, timeout)
    finally:
        for rank in ranks:
            _kill(rank, "killed by the test")
    return [_completed(number, rank) for number, rank in enumerate(ranks)]


def check_ended_well(ranks: Sequence[Completed]) -> Sequence[Completed]:
    """The same, after asserting that every rank ended well; the message shows what each one
    said.
    """
    failed = [
        f"--- rank {r.rank} ended with {r.returncode}\n{r.stdout[-2000:]}\n{r.stderr[-4000:]}"
        for r in ranks
        if r.returncode
    ]
    assert not failed, "\n".join(failed)
    return ranks


def assert_one_line(ranks: Sequence[Completed], line: str) -> None:
    """Every rank ended with status 2, and one line of error is all that was said."""
    said = "\n".join(rank.stderr for rank in ranks)
    assert {rank.returncode for rank in ranks} == {2}, said
    assert len(re.findall(r"^error(?: on rank \d+)?: ", said, re.MULTILINE)) == 1, said
    assert len(said.split("\n")) == 1 + len(ranks), said
    assert line in said
    assert not any(rank.stdout for rank in ranks)


def until(true: Callable[[], bool], within: float = 3) -> bool:
    """Waits for a condition; False if it does not become true in time."""
    deadline = time.monotonic() + within
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(
    args: Sequence[str], cwd: Path, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    # Its own session: killing a rank takes its loader workers along, and nobody else.
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd,
        env=dict(env),
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def _wait(ranks: Sequence[_Rank], timeout: float) -> None:
    deadline, reason = time.monotonic() + timeout, f"killed after {timeout:g} s"
    while any(rank.process.poll() is None for rank in ranks):
        if any(rank.process.poll() for rank in ranks) and time.monotonic() + GRACE_S < deadline:
            deadline, reason = (
                time.monotonic() + GRACE_S,
                f"killed: still running {GRACE_S:g} s after another rank had failed",
            )
        if time.monotonic() > deadline:
            for rank in ranks:
                _kill(rank, reason)
            return
        time.sleep(0.02)


def _kill(rank: _Rank, note: str) -> None:
    if rank.process.poll() is None:
        os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
        rank.note = f"\n[{note}]"


def _completed(number: int, rank: _Rank) -> Completed:
    texts = []
    for stream in (rank.stdout, rank.stderr):
        stream.seek(0)
        texts.append(stream.read().decode(errors="replace"))
        stream.close()
    assert rank.process.returncode is not None
    return Completed(number, rank.process.returncode, texts[0], texts[1] + rank.note)
