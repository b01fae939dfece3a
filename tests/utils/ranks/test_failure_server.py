"""The failure server survives any message, or the run ends with an error."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.ranks import run_ranks as ranks
from utils.ranks import failure_server
from utils.ranks.connection import LONGEST
from utils.ranks.failure import ECHO, ENDED, FOUND, PRINTED, Failure
from utils.ranks.failure_server import FailureServer

WHERE = "MASTER_ADDR=here MASTER_PORT=1"


@contextmanager
def serving(world_size: int = 2, timeout_s: float = 60) -> Iterator[FailureServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = FailureServer([listener], world_size, timeout_s, WHERE)
    made.local.sendall(introduction(0))
    try:
        yield made
    finally:
        made.local.close()
        made.leave()
        assert not any(thread.name == "failure server" for thread in threading.enumerate())


def introduction(rank: object) -> bytes:
    return json.dumps({"rank": rank}).encode() + b"\n"


def connected(to: FailureServer) -> socket.socket:
    return socket.create_connection(to._listeners[0].getsockname(), timeout=8)


def ended(connection: socket.socket, within: float = 5) -> bool:
    """Returns whether the other side has closed the connection."""
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
    "rank too large": introduction(2),
    "negative rank": introduction(-1),
    "rank of text": introduction("1"),
    "rank of truth": introduction(True),
    "huge number": b'{"rank": ' + b"9" * 5000 + b"}\n",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "endless": b"x" * 100_000,
    "list": b"[1]\n",
    "nothing": b"\n",
}


def test_whoever_is_no_rank_is_dropped_and_ranks_still_come_in() -> None:
    """The port is open to all until all ranks have come."""
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
    b"[" * 60000,
    b"{}",
    b"[]",
    b"7",
    b"\xff",
    b'{"beat": 1}',
    b'{"beat": [1, 2]}',
    b'{"beat": ["a", "b", "c"]}',
    b'{"beat": [1, null, "x"]}',
    b'{"beat": [1e999, 0, "x"]}',
    b'{"failed": 1}',
    b'{"failed": ["x", "y", "found", ""]}',
    b'{"failed": ["x", 1, "lost", ""]}',
    b'{"failed": ["x", 1, [], ""]}',
    b'{"failed": ["x", 1]}',
]


def test_nothing_that_a_rank_says_ends_the_thread() -> None:
    with serving(3) as one, connected(one) as mad, connected(one) as other:
        mad.sendall(introduction(1))
        assert heard(mad, "here")
        for words in MAD:
            mad.sendall(words + b"\n")
        other.sendall(introduction(2))
        assert heard(other, "here")
        assert one._verdict == {}


def test_nobody_can_connect_once_all_ranks_have_come() -> None:
    with serving() as one, connected(one) as silent, connected(one) as friend:
        address = one._listeners[0].getsockname()
        friend.sendall(introduction(1))
        assert heard(friend, "here")
        assert ended(silent)
        with pytest.raises(ConnectionError):
            socket.create_connection(address, timeout=8)


@pytest.mark.parametrize("late", [[1], [1, 2]])
def test_ranks_that_do_not_come_are_named(
    late: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failure_server, "WORD_S", 0.3)
    with ExitStack() as stack:
        one = stack.enter_context(serving(3, timeout_s=1))
        if late == [1]:
            stack.enter_context(connected(one)).sendall(introduction(2))
        end = heard(one.local, "end")
    ranks = "rank 1 of 3" if late == [1] else "ranks 1, 2 of 3"
    line = f"{WHERE}: {ranks} did not come within timeout_s=1 s; check that all ranks run"
    assert end == {"end": f"{line} and see one address", "status": 2, "patient": False}
    said = f"waiting for {ranks} at {WHERE}\nerror: {line} and see one address\n"
    assert capfd.readouterr().err == said


def test_a_silent_stranger_does_not_hold_up_the_end() -> None:
    with ExitStack() as kept:
        with serving() as one:
            stranger = kept.enter_context(connected(one))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert ended(stranger)


def test_a_second_process_of_one_rank_is_refused() -> None:
    with serving(3) as one, connected(one) as first, connected(one) as second:
        first.sendall(introduction(1))
        assert heard(first, "here")
        second.sendall(introduction(1) + b'{"failed": ["no", 1, "found", ""]}\n')
        assert heard(second, "refused") == {"refused": f"{WHERE}: rank 1 is there already"}
        assert ended(second)
        first.sendall(b'{"beat": [1, -1, "x"]}\n')
        assert heard(first, "here"), "the first one is still listened to"


def test_a_rank_that_comes_late_hears_why_the_run_has_ended() -> None:
    with serving(3) as one, connected(one) as first, connected(one) as late:
        first.sendall(
            introduction(1)
            + json.dumps({"failed": Failure("lr=x", 2, PRINTED).row()}).encode()
            + b"\n"
        )
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
        (
            [(0, BROKEN), (2, TRACED)],
            "error on rank 2: KeyError: 'x'\nTraceback\n…\nKeyError: 'x'\n",
            1,
        ),
        (
            [(0, TRACED), (1, TRACED), (2, TRACED)],
            "error: KeyError: 'x'\nTraceback\n…\nKeyError: 'x'\n",
            1,
        ),
        (
            [(2, GONE), (0, BROKEN), (1, GONE)],
            "error: ranks 1, 2 are gone (killed, or its host is down)\n",
            1,
        ),
        ([(2, GONE), (1, Failure("no memory", 1))], "error on rank 1: no memory\n", 1),
        ([(2, GONE), (1, EXIT)], "error: rank 1 ended with exit status 3\n", 3),
        ([(1, BROKEN)], "error on rank 1: RuntimeError: gloo\nTraceback\nRuntimeError: gloo\n", 1),
        ([(1, EXIT), (0, Failure("stopped", 143, PRINTED))], "", 143),
    ],
)
def test_the_best_report_is_printed_once_and_everybody_hears_of_it(
    reports: list[tuple[int, Failure | None]],
    line: str,
    status: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(failure_server.PATIENCE_S, ECHO, 2.0)
    with ExitStack() as stack:
        one = stack.enter_context(serving(3))
        ranks = [one.local, *(stack.enter_context(connected(one)) for _ in range(2))]
        ranks[1].sendall(introduction(1))
        ranks[2].sendall(introduction(2))
        assert all(heard(rank, "here") for rank in ranks)
        for rank, failure in reports:
            (
                ranks[rank].sendall(json.dumps({"failed": failure.row()}).encode() + b"\n")
                if failure
                else ranks[rank].shutdown(socket.SHUT_WR)
            )
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
    code = (
        "from utils.command import cli\ncli.main(lambda:"
        f" exec({FAILING.format(file=str(tmp_path / 'now'))!r}, {{}}))"
    )
    done = ranks(2, ["-c", code], timeout=40)
    assert [rank.returncode for rank in done] == [1, 1], done
    assert (
        done[0].stderr
        == "error: the watch over all ranks has failed on rank 0 (LookupError: planted)\n"
    )
    assert done[1].stderr == ""
