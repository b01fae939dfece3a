"""What arrives at the hub from strangers, and from ranks that have gone mad: it goes on, or the run ends aloud."""

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
from utils.ranks import failure_server as hub_module
from utils.ranks.failure_server import INTRODUCE_S, STRANGERS, Hub

KEY = "sesame"


@contextmanager
def hub(world_size: int = 2) -> Iterator[Hub]:
    made = Hub("127.0.0.1", world_size, 60, KEY)
    made.local.sendall(introduction(0))
    try:
        yield made
    finally:
        made.local.close()
        made.leave()
        assert not any(thread.name == "hub" for thread in threading.enumerate())


def introduction(rank: object, key: object = KEY) -> bytes:
    return json.dumps({"rank": rank, "key": key}).encode() + b"\n"


def connected(to: Hub) -> socket.socket:
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
    "wrong key": introduction(1, "guess") + b'{"failed": "no", "status": 1, "spoken": true}\n',
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
    with hub() as one:
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
    b'{"stop": {}, "why": ""}', b'{"stop": 9, "why": "kill"}', b'{"failed": 1}', b'{"failed": "x", "status": "y", "spoken": true}',
    b'{"failed": "x", "status": 1}',
]  # fmt: skip


def test_nothing_that_a_rank_says_ends_the_thread() -> None:
    with hub(3) as one, connected(one) as mad, connected(one) as other:
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
    monkeypatch.setattr(hub_module, "INTRODUCE_S", 1.5)
    assert INTRODUCE_S == 5.0
    with ExitStack() as crowd, hub() as one:
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
        with hub() as one:
            stranger = kept.enter_context(connected(one))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert ended(stranger)


def test_the_second_process_of_one_rank_is_told_so() -> None:
    with hub() as one, connected(one) as first, connected(one) as second:
        first.sendall(introduction(1))
        assert heard(first, "here")
        second.sendall(introduction(1))
        refusal = heard(second, "end")
        assert refusal == {
            "end": "a second process is rank 1; give each process its own number",
            "status": 2,
            "speaker": 1,
            "patient": True,
        }
        assert ended(second)
        first.sendall(b'{"stop": 15, "why": ""}\n')
        assert heard(first, "stop"), "the first one is still listened to"


def test_it_listens_where_it_is_told() -> None:
    with hub() as one:
        assert one._listener.getsockname()[0] == "127.0.0.1"


FAILING = """
import os, time
from utils.ranks import distributed
from utils.ranks import failure_server
from utils.ranks.failure_server import Hub
def fail(self, now):
    if os.path.exists({file!r}):
        raise LookupError("planted")
Hub._judge = fail
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
class Hub(rendezvous.Hub):
    def __init__(self, *args):
        keys.append(args[-1])
        super().__init__(*args)
rendezvous.Hub = Hub
dist = distributed.start(device="cpu", timeout_s=30, folder=folder / "not" / "yet")
told = distributed._current.store  # a client of the same store
dist.barrier()
if dist.is_main:
    store = distributed.c10d.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    texts = [store.get(key) for key in ("attempt0/key", "attempt0/hub")]
    print(keys[0].encode() in b" ".join(texts))
dist.barrier()
distributed.stop()
"""


@pytest.mark.parametrize(("sight", "in_store"), [("seen", False), ("hidden", True)])
def test_the_key_goes_by_a_private_file_where_all_see_it(sight: str, in_store: bool, tmp_path) -> None:
    done = succeeded(ranks(2, ["-c", KEYS, str(tmp_path), sight], timeout=40))
    assert done[0].stdout == f"{in_store}\n"
    assert not list(tmp_path.iterdir()), "nothing stays behind"
