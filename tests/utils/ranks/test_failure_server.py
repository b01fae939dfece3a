"""What arrives at the failure server from strangers, and from ranks that have gone mad: it goes on, or the run ends aloud."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.ranks import run_ranks as ranks
from tests.ranks import succeeded, until
from utils.ranks import failure_server
from utils.ranks.connection import LONGEST
from utils.ranks.failure import ECHO, ENDED, FOUND, PRINTED, Failure
from utils.ranks.failure_server import INTRODUCE_S, STRANGERS, FailureServer

KEY = "sesame"


@contextmanager
def serving(world_size: int = 2) -> Iterator[FailureServer]:
    made = FailureServer("127.0.0.1", world_size, 60, KEY)
    made.local.sendall(introduction(0))
    try:
        yield made
    finally:
        made.local.close()
        made.leave()
        assert not any(thread.name == "failure server" for thread in threading.enumerate())


def introduction(rank: object, key: object = KEY) -> bytes:
    return json.dumps({"rank": rank, "key": key}).encode() + b"\n"


def connected(to: FailureServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", to.port), timeout=8)


def ended(connection: socket.socket, within: float = 5) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(within)
    try:
        while connection.recv(1 << 16):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def heard(connection: socket.socket, word: str, within: float = 5) -> dict:
    """The first message that has this word."""
    connection.settimeout(within)
    received = b""
    while True:
        chunk = connection.recv(1 << 16)
        assert chunk, f"it ended without {word}: {received!r}"
        received += chunk
        for line in received.split(b"\n")[:-1]:
            if word in json.loads(line):
                return json.loads(line)


STRANGE = {
    "deep": b"[" * 60000 + b"\n",
    "wrong key": introduction(1, "guess") + b'{"failed": ["no", 1, "found", ""]}\n',
    "no text for a key": introduction(1, 7),
    "unicode key": introduction(1, "\udce4"),
    "rank too large": introduction(2),
    "negative rank": introduction(-1),
    "rank of text": introduction("1"),
    "rank of truth": introduction(True),
    "huge number": b'{"rank": ' + b"9" * 5000 + b', "key": "sesame"}\n',
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "endless": b"x" * 100_000,
    "list": b"[1]\n",
    "nothing": b"\n",
}


def test_strangers_are_shown_the_door_and_ranks_still_come_in() -> None:
    """The port is open to all; what does not know the key is not listened to."""
    with serving() as one:
        for name, words in STRANGE.items():
            with connected(one) as stranger:
                with suppress(ConnectionError):
                    stranger.sendall(words)
                assert ended(stranger), name
        with connected(one) as friend:
            friend.sendall(introduction(1))
            assert heard(friend, "here")
            friend.sendall(b'{"left": true}\n')


MAD = [
    b"[" * 60000, b"{}", b"[]", b"7", b"\xff", b'{"beat": 1}', b'{"beat": [1, 2]}', b'{"beat": ["a", "b", "c"]}',
    b'{"beat": [1, null, "x"]}', b'{"beat": [1e999, 0, "x"]}', b'{"stop": 15}', b'{"stop": "x", "why": ""}', b'{"stop": [], "why": ""}',
    b'{"stop": {}, "why": ""}', b'{"stop": 9, "why": "kill"}', b'{"failed": 1}', b'{"failed": ["x", "y", "found", ""]}',
    b'{"failed": ["x", 1, "lost", ""]}', b'{"failed": ["x", 1, [], ""]}', b'{"failed": ["x", 1]}',
]  # fmt: skip


def test_nothing_that_a_rank_says_ends_the_thread() -> None:
    with serving(3) as one, connected(one) as mad, connected(one) as other:
        mad.sendall(introduction(1))
        assert heard(mad, "here")
        for words in MAD:
            mad.sendall(words + b"\n")
        other.sendall(introduction(2))
        assert heard(other, "here")
        other.sendall(b'{"stop": 15, "why": ""}\n')
        assert heard(mad, "stop") == {"stop": 15}, "nothing else was taken for a request"


def test_a_crowd_of_silent_strangers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than so many are let in at once; the oldest go, and those who stay silent go too."""
    monkeypatch.setattr(failure_server, "INTRODUCE_S", 1.5)
    assert INTRODUCE_S == 5.0
    with ExitStack() as crowd, serving() as one:
        before = len(os.listdir("/proc/self/fd"))
        strangers = [crowd.enter_context(connected(one)) for _ in range(3 * STRANGERS)]
        deadline = time.monotonic() + 5
        while len(one._strangers()) > STRANGERS + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= before + len(strangers) + STRANGERS + 2
        assert ended(strangers[0])
        with connected(one) as friend:
            friend.sendall(introduction(1))
            assert heard(friend, "here")
            assert ended(strangers[-1], 4), "it had its time to say who it is"
            assert until(lambda: not one._strangers())
            friend.sendall(b'{"left": true}\n')


def test_a_silent_stranger_does_not_hold_up_the_end() -> None:
    with ExitStack() as kept:
        with serving() as one:
            stranger = kept.enter_context(connected(one))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert ended(stranger)


def test_a_second_process_of_one_rank_is_a_stranger() -> None:
    with serving() as one, connected(one) as first, connected(one) as second:
        first.sendall(introduction(1))
        assert heard(first, "here")
        second.sendall(introduction(1) + b'{"failed": ["no", 1, "found", ""]}\n')
        assert ended(second)
        first.sendall(b'{"stop": 15, "why": ""}\n')
        assert heard(first, "stop"), "the first one is still listened to"


def test_a_rank_that_comes_late_hears_why_the_run_has_ended() -> None:
    with serving(3) as one, connected(one) as first, connected(one) as late:
        first.sendall(introduction(1) + json.dumps({"failed": Failure("lr=x", 2, PRINTED).row()}).encode() + b"\n")
        assert heard(first, "end")["end"] == "lr=x"
        late.sendall(introduction(2))
        assert heard(late, "end")["end"] == "lr=x"


def test_who_goes_when_rank_0_has_left_is_not_missed(capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as kept, serving() as one:
        rank = kept.enter_context(connected(one))
        rank.sendall(introduction(1))
        assert heard(rank, "here")
        leaving = threading.Thread(target=one.leave)
        leaving.start()
        assert heard(rank, "left")
        time.sleep(0.2)  # a slow host
        rank.close()
        leaving.join()
    assert capfd.readouterr().err == ""


GONE, TRACED = None, Failure("KeyError: 'x'", 1, FOUND, "Traceback\n…\nKeyError: 'x'")
BROKEN = Failure("RuntimeError: gloo", 1, ECHO, "Traceback\nRuntimeError: gloo")
EXIT = Failure("rank 1 ended with exit status 3", 3, ENDED)


@pytest.mark.parametrize(
    ("reports", "line", "status"),
    [
        ([(1, Failure("lr=x", 2))], "error on rank 1: lr=x\n", 2),
        ([(2, Failure("lr=x", 2)), (0, Failure("lr=x", 2))], "error: lr=x\n", 2),
        ([(2, Failure("lr=x", 2)), (0, Failure("lr=y", 2))], "error on rank 2: lr=x\n", 2),
        ([(0, BROKEN), (2, TRACED)], "error on rank 2: KeyError: 'x'\nTraceback\n…\nKeyError: 'x'\n", 1),
        ([(0, TRACED), (1, TRACED), (2, TRACED)], "error: KeyError: 'x'\nTraceback\n…\nKeyError: 'x'\n", 1),
        ([(2, GONE), (0, BROKEN), (1, GONE)], "error: ranks 1, 2 are gone (killed, or its host is down)\n", 1),
        ([(2, GONE), (1, Failure("no memory", 1))], "error on rank 1: no memory\n", 1),
        ([(2, GONE), (1, EXIT)], "error: rank 1 ended with exit status 3\n", 3),
        ([(1, BROKEN)], "error on rank 1: RuntimeError: gloo\nTraceback\nRuntimeError: gloo\n", 1),
        ([(1, EXIT), (0, Failure("stopped", 143, PRINTED))], "", 143),
    ],
)
def test_the_best_report_is_printed_once_and_everybody_hears_of_it(
    reports: list[tuple[int, Failure | None]], line: str, status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(failure_server.PATIENCE_S, ECHO, 2.0)
    with ExitStack() as stack:
        one = stack.enter_context(serving(3))
        ranks = [one.local, *(stack.enter_context(connected(one)) for _ in range(2))]
        ranks[1].sendall(introduction(1))
        ranks[2].sendall(introduction(2))
        assert all(heard(rank, "here") for rank in ranks)
        for rank, failure in reports:
            ranks[rank].sendall(json.dumps({"failed": failure.row()}).encode() + b"\n") if failure else ranks[rank].shutdown(socket.SHUT_WR)
            time.sleep(0.05)  # one after the other
        end = heard(ranks[0], "end")
    assert end["status"] == status
    assert end["end"] in line or not line
    assert capfd.readouterr().err == line


@pytest.mark.parametrize("text", ["x" * 100_000, "😀" * 50_000])
def test_the_longest_report_fits_into_a_message(text: str) -> None:
    message = json.dumps({"failed": Failure(text, 1, FOUND, text).row()})
    assert len(message) < LONGEST
    read = Failure.from_row(json.loads(message)["failed"])
    assert text.startswith(read.text)
    assert read.trace.startswith(text[:100])
    assert read.trace.endswith(text[-100:])


def test_it_listens_at_the_given_address() -> None:
    with serving() as one:
        assert one._listener.getsockname()[0] == "127.0.0.1"


FAILING = """
import os, time
from utils.ranks import distributed
from utils.ranks import failure_server
from utils.ranks.failure_server import FailureServer
def fail(self, now):
    if os.path.exists({file!r}):
        raise LookupError("planted")
FailureServer._judge = fail
dist = distributed.start(device="cpu", timeout_s=60)
dist.barrier()
open({file!r}, "w").close()
while True:
    dist.sums([1.0])
    time.sleep(0.05)
"""


def test_should_the_thread_fail_all_the_same_the_run_ends_aloud(tmp_path) -> None:
    code = f"from utils.command import cli\ncli.main(lambda: exec({FAILING.format(file=str(tmp_path / 'now'))!r}, {{}}))"
    done = ranks(2, ["-c", code], timeout=40)
    assert [rank.returncode for rank in done] == [1, 1], done
    assert done[0].stderr == "error: the watch over all ranks has failed on rank 0 (LookupError: planted)\n"
    assert done[1].stderr == ""


KEYS = """
import os, stat, sys
from pathlib import Path
from utils.ranks import distributed
from utils.ranks import key_file
from utils.ranks import rendezvous
folder = Path(sys.argv[1])
real = key_file.read_key
def read(file):
    seen = Path(file)
    assert seen.parent == folder and stat.S_IMODE(seen.stat().st_mode) == 0o600, file
    return "" if sys.argv[2] == "hidden" else real(file)
rendezvous.read_key = read
keys = []
class FailureServer(rendezvous.FailureServer):
    def __init__(self, *args):
        keys.append(args[-1])
        super().__init__(*args)
rendezvous.FailureServer = FailureServer
dist = distributed.start(device="cpu", timeout_s=30, folder=folder / "not" / "yet")
dist.barrier()
if dist.is_main:
    store = distributed.c10d.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    texts = [store.get(key) for key in ("key", "server")]
    print(keys[0].encode() in b" ".join(texts))
dist.barrier()
distributed.stop()
"""


@pytest.mark.parametrize(("sight", "in_store"), [("seen", False), ("hidden", True)])
def test_the_key_goes_by_a_private_file_where_all_see_it(sight: str, in_store: bool, tmp_path) -> None:
    done = succeeded(ranks(2, ["-c", KEYS, str(tmp_path), sight], timeout=40))
    assert done[0].stdout == f"{in_store}\n"
    assert not list(tmp_path.iterdir()), "nothing stays behind"
