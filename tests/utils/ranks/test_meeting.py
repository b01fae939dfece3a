"""Ranks that do not find each other: one line each, in seconds, whatever is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER_PREFIXES, ROOT, free_port, until
from utils.ranks import meeting

START = """
import os, sys
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as pretrain.py sets it
from utils.command import cli
from utils.ranks import distributed
from utils.ranks import meeting
meeting.WORD_S, meeting.UNKNOWN_S, meeting.STORE_S = 0.5, 1.0, 2.0
cli.main(lambda: distributed.start(device="cpu", timeout_s=6))
"""


def rank(
    number: object,
    size: int,
    port: int,
    address: str = "127.0.0.1",
    ends_first: str = "",
    timeout_s: int = 6,
) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    env |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    code = ends_first + START.replace("timeout_s=6", f"timeout_s={timeout_s}")
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def silent() -> Iterator[int]:
    """Something that accepts and says nothing."""
    listener, kept = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        try:
            while True:
                kept.append(listener.accept())
        except OSError:
            pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection, _ in kept:
            connection.close()


@pytest.mark.slow
def test_each_way_of_not_meeting_is_said_in_one_line() -> None:
    """All at the same time: what is said while a rank waits, its last line, and its exit status."""
    with ExitStack() as stack:
        foreign, taken = stack.enter_context(silent()), stack.enter_context(silent())
        a, b, c, d = (free_port() for _ in range(4))
        nowhere = f"MASTER_ADDR=nowhere.invalid MASTER_PORT={a}"

        def at(port: int) -> str:
            return f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"

        correct = "; check that rank 0 runs, and correct the address where it is wrong\n"
        see_one = "; check that all ranks run and see one address\n"
        another = (
            "; check that all ranks run and see the same address, or export another MASTER_PORT\n"
        )
        cases = [
            (
                "a name that nobody knows",
                rank(1, 2, a, "nowhere.invalid"),
                (
                    f"rank 1 waits for rank 0 at {nowhere} (that name is not known here)\nerror on"
                    f" rank 1: {nowhere}: rank 1 of 2 did not find rank 0 (that name is not known"
                    f" here){correct}"
                ),
            ),
            (
                "a port where nobody listens",
                rank(1, 2, b),
                (
                    f"rank 1 waits for rank 0 at {at(b)} (nobody listens there)\nerror on rank 1:"
                    f" {at(b)}: rank 1 of 2 did not find rank 0 (nobody listens there){correct}"
                ),
            ),
            (
                "no port",
                rank(1, 2, 99999),
                "error: MASTER_PORT=99999 is no port; export one from 1024 to 65535\n",
            ),
            (
                "somebody else's port",
                rank(1, 2, foreign),
                f"error on rank 1: {at(foreign)}: rank 1 of 2 could not meet the others (what"
                f" listens there does not answer as a store){another}",
            ),
            (
                "a port that is taken",
                rank(0, 2, taken),
                (
                    f"error: {at(taken)}: rank 0 of 2 could not meet the others ([Errno 98] Address"
                    " already in use (while attempting to bind on address ('127.0.0.1',"
                    f" {taken}))){another}"
                ),
            ),
            (
                "rank 1 does not come",
                rank(0, 2, c),
                (
                    f"waiting for rank 1 of 2 at {at(c)}\nerror: {at(c)}: rank 1 of 2 did not come"
                    f" within timeout_s=6 s{see_one}"
                ),
            ),
            (
                "one of three is killed before",
                rank(0, 3, d),
                f"error: {at(d)}: rank 2 of 3 did not come within timeout_s=6 s{see_one}",
            ),
            ("and the other", rank(1, 3, d), ""),
            (
                "the one that is",
                rank(
                    2, 3, d, ends_first="import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
                ),
                "",
            ),
        ]
        outcomes = {
            name: (process.communicate(timeout=60)[0], process.returncode)
            for name, process, _ in cases
        }
    for name, _, expected in cases:
        (text, status), lines = outcomes[name], expected.splitlines()
        # on a busy machine others come so late that a word is said of them, too
        said = [
            line
            for line in text.splitlines()
            if line in lines or not line.startswith(("waiting for", "rank 1 waits for"))
        ]
        assert said == lines, name
        assert status == (-9 if "the one that is" in name else 2), name


@pytest.mark.parametrize(("host", "everywhere"), [("localhost", False), ("node1", True)])
def test_a_loopback_name_listens_at_loopback_alone(host: str, everywhere: bool) -> None:
    store = meeting._hosted(host, 0, 5)
    number = f":{store.port:04X} "
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = "".join(table.read_text() for table in tables if table.exists()).splitlines()
    listens = {
        line.split()[1].partition(":")[0] for line in lines if " 0A " in line and number in line
    }
    assert listens == ({"0" * 32} if everywhere else {"0100007F"})


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="looks for a process that is nobody's child"
)
def test_ranks_whose_launcher_is_killed_before_they_meet_end_at_once(tmp_path: Path) -> None:
    """They would wait for its store as long as for a rank that is late."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    env |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    code = START.replace("timeout_s=6", "timeout_s=60")
    launcher = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {code!r}]);"
        " time.sleep(60)"
    )
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", launcher], cwd=ROOT, env=env, stdout=out, stderr=out
        )
    try:
        said = "rank 0 waits for rank 0 at"
        assert until(lambda: said in (tmp_path / "out").read_text(), 30)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (rank_0,) = (int(pid) for pid in children.read_text().split())
    finally:
        process.kill()
        process.wait()
    assert until(
        lambda: (
            not Path(f"/proc/{rank_0}/cmdline").exists()
            or not Path(f"/proc/{rank_0}/cmdline").read_bytes()
        ),
        5,
    )
    last = "stopped by SIGTERM before training began\n"
    assert (tmp_path / "out").read_text().endswith(last)
