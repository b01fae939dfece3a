"""Signals as requests: heard whatever the main thread does, and never taken for something else."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import started
from tests.runs import launched
from utils.ranks import signals

LISTEN = """
import os, sys, threading, time
from signal import SIGINT, SIGTERM, SIGUSR1
from utils.ranks import signals
signals.install({rank})
{body}
print("ready", flush=True)
ready = True
{wait}
"""
# The interpreter does not come round to its handlers in here.
IN_C = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000_000)"
REPORT = """
ready = False
def report():
    while not (ready and signals.stop_signal()): time.sleep(0.01)
    print("asked", signals.stop_signal(), flush=True)
    time.sleep({seconds})
    os._exit(7)
threading.Thread(target=report).start()
"""


@contextmanager
def listener(body: str = "", wait: str = IN_C, rank: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that listens, once it does."""
    code = LISTEN.format(body=body, wait=wait, rank=rank)
    process = started([sys.executable, "-c", code])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def send(process: subprocess.Popen[str], *signums: int, pause: float = 0.05) -> None:
    for signum in signums:
        process.send_signal(signum)
        time.sleep(pause)


def end(process: subprocess.Popen[str], limit: float = 10) -> tuple[int, str, str]:
    process.wait(limit)
    # not communicate(): some of it may lie in this stream's buffer since the first line
    assert process.stdout is not None
    assert process.stderr is not None
    return process.returncode, process.stdout.read(), process.stderr.read()


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_before_training_a_signal_ends_the_process_at_once(name: str, status: int) -> None:
    with listener() as process:
        send(process, getattr(signal, name))
        assert end(process, 3) == (status, "", f"stopped by {name} before training began\n")
    with listener(rank=1) as process:
        send(process, getattr(signal, name))
        assert end(process, 3) == (status, "", ""), "rank 0 says it"


def test_later_it_asks_though_the_main_thread_is_in_c_and_as_often_as_one_likes() -> None:
    signum = signal.SIGUSR1
    with listener("signals.defer()" + REPORT.format(seconds=0.5)) as process:
        send(process, signum, signal.SIGTERM, signum, signal.SIGUSR1, signal.SIGTERM)
        assert end(process) == (7, f"asked {int(signum)}\n", ""), "the first one counts"


def test_a_terminal_that_is_closed_asks_to_stop_unless_nohup_says_not() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children inherit it
    try:
        with listener("signals.defer()" + REPORT.format(seconds=0.2)) as process:
            send(process, signal.SIGHUP)
            assert end(process) == (7, f"asked {int(signal.SIGTERM)}\n", "")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with listener() as process:
            send(process, signal.SIGHUP, signal.SIGUSR1)
            assert end(process, 3)[0] == 138
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_asks_once_and_ends_the_second_time(rank: int) -> None:
    asks = "Ctrl-C: saving, then stopping; again to stop at once\n"
    with listener("signals.defer()" + REPORT.format(seconds=1.5), rank=rank) as process:
        send(process, signal.SIGINT, signal.SIGINT)
        assert end(process) == (7, "asked 2\n", "" if rank else asks), (
            "torchrun forwards what the terminal has sent as well"
        )
    with listener("signals.defer()" + REPORT.format(seconds=9), rank=rank) as process:
        send(process, signal.SIGINT, signal.SIGINT, pause=1.2)
        assert end(process) == (
            130,
            "asked 2\n",
            "" if rank else f"{asks}stopped at once by Ctrl-C\n",
        )


def test_a_forked_worker_neither_dies_nor_tells() -> None:
    body = """
signals.defer()
child = os.fork()
if child == 0:
    signals.quiet_worker()
    time.sleep(1.5)
    os._exit(5)
time.sleep(0.3)
for signum in (SIGTERM, SIGINT, SIGUSR1): os.kill(child, signum)
assert os.waitpid(child, 0)[1] == 5 << 8
"""
    with listener(body, wait="print(signals.stop_signal())") as process:
        assert end(process) == (0, "0\n", "")


@pytest.mark.parametrize(
    ("asked", "followed"),
    [
        ([0, 0], 0),
        ([signal.SIGUSR1, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGINT, signal.SIGTERM, 0], signal.SIGTERM),
    ],
)
def test_ranks_agree_on_one_signal(asked: Sequence[int], followed: int) -> None:
    flags = [[float(each == signum) for each in signals.ORDER] for signum in asked]
    assert signals.agreed_signal([sum(column) for column in zip(*flags, strict=True)]) == followed


@pytest.mark.slow
def test_help_that_nobody_reads_to_its_end_is_no_error() -> None:
    line = f"{shlex.quote(sys.executable)} pretrain.py --help | head -1"
    done = launched(["sh", "-c", line])
    assert done.stdout.startswith("usage: python pretrain.py ")
    assert done.stderr == ""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="reads from /proc which signals a process handles",
)
def test_ctrl_c_while_python_loads_is_one_line() -> None:
    process = started([sys.executable, "pretrain.py", "experiment=demo"])
    try:
        # Python itself handles SIGINT from its first moment on
        while not handles(process.pid, signal.SIGTERM):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (130, "stopped by SIGINT before training began\n")


def handles(pid: int, signum: int) -> bool:
    (caught,) = re.findall(r"^SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(caught, 16) >> (signum - 1) & 1)
