"""Ranks that do not find each other: one line each, in seconds, whatever is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER_PREFIXES, ROOT, free_port, until
from utils.ranks import addresses
from utils.ranks.key_file import offered, read_key

START = """
import os, sys
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as the command line sets it before PyTorch is loaded
from utils.command import cli
from utils.ranks import distributed
from utils.ranks import rendezvous
rendezvous.WORD_S, rendezvous.UNKNOWN_S, rendezvous.STORE_S = 0.5, 1.0, 2.0
cli.main(lambda: distributed.start(device="cpu", timeout_s=6))
"""


def rank(number: object, size: int, port: int, address: str = "127.0.0.1", ends_first: str = "") -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    env |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    code = ends_first + START
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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
        taken, (a, b, c, d, e) = stack.enter_context(silent()), (free_port() for _ in range(5))
        nowhere = f"MASTER_ADDR=nowhere.invalid MASTER_PORT={a}"

        def at(port: int) -> str:
            return f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"

        correct = "; check that rank 0 runs, and correct the address where it is wrong\n"
        see_one = "; check that all ranks run and see one address\n"
        another = "; check that all ranks run and see the same address, or export another MASTER_PORT\n"
        cases = [
            (
                "a name that nobody knows", rank(1, 2, a, "nowhere.invalid"),
                f"rank 1 waits for rank 0 at {nowhere} (that name is not known here)\n"
                f"error on rank 1: {nowhere}: rank 1 of 2 did not find rank 0 (that name is not known here){correct}",
            ),
            (
                "a port where nobody listens", rank(1, 2, b),
                f"rank 1 waits for rank 0 at {at(b)} (nobody listens there)\n"
                f"error on rank 1: {at(b)}: rank 1 of 2 did not find rank 0 (nobody listens there){correct}",
            ),
            ("no port", rank(1, 2, 99999), "error on rank 1: MASTER_PORT=99999 is no port; export one from 1024 to 65535\n"),
            (
                "somebody else's port", rank(1, 2, taken),
                f"error on rank 1: {at(taken)}: rank 1 of 2 could not meet the others (what listens there does not answer as a store)"
                + another,
            ),
            (
                "a port that is taken", rank(0, 2, taken),
                f"error: {at(taken)}: rank 0 of 2 could not meet the others ([Errno 98] Address already in use (while attempting to bind "
                f"on address ('127.0.0.1', {taken}))){another}",
            ),
            (
                "rank 1 does not come", rank(0, 2, c),
                f"waiting for rank 1 of 2 at {at(c)}\nerror: {at(c)}: rank 1 of 2 did not come within timeout_s=6 s{see_one}",
            ),
            (
                "one of three is killed before", rank(0, 3, d),
                f"error: {at(d)}: rank 2 of 3 did not come within timeout_s=6 s{see_one}",
            ),
            ("and the other", rank(1, 3, d), ""),
            ("the one that is", rank(2, 3, d, ends_first="import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"), ""),
        ]  # fmt: skip
        first, second = rank(1, 3, e), rank(1, 3, e)
        host = rank(0, 3, e)
        found = {name: (process.communicate(timeout=60)[0], process.returncode) for name, process, _ in cases}
        twice = [process.communicate(timeout=60)[0] for process in (first, second, host)]
    for name, _, expected in cases:
        (text, status), lines = found[name], expected.splitlines()
        # on a busy machine others come so late that a word is said of them, too
        said = [line for line in text.splitlines() if line in lines or not line.startswith(("waiting for", "rank 1 waits for"))]
        assert said == lines, name
        assert status == (-9 if "the one that is" in name else 2), name
    there = f"error on rank 1: {at(e)}: rank 1 is there already; give each process a number of its own\n"
    assert sum(text.endswith(there) for text in twice[:2]) == 1, twice
    assert f"rank 2 of 3 did not come within timeout_s=6 s{see_one}" in twice[2]


@pytest.mark.parametrize(
    ("places", "views", "expected"),
    [
        (["x", "x"], ["127.0.0.1", "10.9.9.9"], ("127.0.0.1", "127.0.0.1")),
        (["x", "y"], ["127.0.1.1", "OWN"], ("OWN", "OWN")),
        (["x", "x", "y"], ["127.0.1.1", "127.0.1.1", "OWN"], ("OWN", "OWN")),
        (["x", "y"], ["OWN", "127.0.0.1"], ("master", "")),  # of another host's loopback nobody is reached
        (["x", "y"], ["10.0.0.1", "203.0.113.77"], ("master", "")),  # translated: not an address of this host
        (["x", "y"], ["10.0.0.1", ""], ("master", "")),
    ],
)
def test_rank_0_listens_where_the_others_reach_it_and_no_further(
    places: list[str], views: list[str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "192.0.2.5"
    monkeypatch.setattr(addresses, "_is_own", lambda address: address in (own, "127.0.0.1"))
    views = [own if view == "OWN" else view for view in views]
    found = addresses.reachable("master", places, views)
    assert found == tuple(own if part == "OWN" else part for part in expected)


def test_processes_of_one_host_are_in_one_place() -> None:
    code = "from utils.ranks.addresses import place; print(place())"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert other == addresses.place()
    assert addresses.address_of("localhost") in ("127.0.0.1", "::1")
    assert addresses.address_of("nowhere.invalid") == ""


def test_a_key_that_cannot_be_handed_over_by_file_goes_another_way(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offered(tmp_path / "a" / "b") as (file, key):
        assert os.path.dirname(file) == str(tmp_path)
        assert os.stat(file).st_mode & 0o777 == 0o600
        assert read_key(file) == key
        assert len(key) == 32
    assert not list(tmp_path.iterdir())
    began = time.monotonic()
    monkeypatch.setattr("utils.ranks.key_file.SEEN_S", 0.2)
    assert read_key(str(tmp_path / "gone")) == ""
    assert time.monotonic() - began < 2
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    with offered(tmp_path) as (file, other):
        assert file == ""
        assert other != key


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for a process that is nobody's child")
def test_ranks_whose_launcher_is_killed_before_they_meet_end_at_once(tmp_path: Path) -> None:
    """They would wait for its store as long as for a rank that is late."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    code = START.replace("timeout_s=6", "timeout_s=60")
    launcher = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {code!r}]); time.sleep(60)"
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        said = "rank 0 waits for rank 0 at"
        assert until(lambda: said in (tmp_path / "out").read_text(), 30)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (rank_0,) = (int(pid) for pid in children.read_text().split())
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not Path(f"/proc/{rank_0}/cmdline").exists() or not Path(f"/proc/{rank_0}/cmdline").read_bytes(), 5)
    last = (tmp_path / "out").read_text().splitlines()[-1]
    assert last == "torchrun, which started rank 0, is gone: stopped before training began"
