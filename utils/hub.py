"""Where the ranks' watch threads meet: a small server in a thread of rank 0 that decides why a run ends, and tells everybody.

Messages are lines of JSON. The first verdict counts. A rank that dies closes its connection, which is noticed at once; a rank
that leaves in good order, or fails with an error, says so on the same connection before.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from utils.signals import say

TICK_S = 0.2
SILENT_S = 2.5  # a watch thread tells something twice a second; one that has not for so long is not running
SETTLE_S = 0.3  # before a silent end is told: of several killed at once all are named, and one that speaks for itself is heard
LEAVE_S = 5.0  # how long rank 0 waits for the others to hear that it leaves
LONGEST = 1 << 16  # of a message

Message = dict[str, Any]
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Line:
    """One end of a connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(2.0)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _open.add(connection)
        self.socket = connection
        self._received = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Best effort: whoever does not listen any more will be missed elsewhere."""
        with suppress(OSError), self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has arrived; None at the end of the connection."""
        try:
            chunk = self.socket.recv(LONGEST)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        if len(self._received) > LONGEST or not (chunk or lines):
            return None
        return list(_messages(lines))

    def finish(self) -> None:
        """Send no more; what is under way still arrives."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


@dataclass
class Peer:
    """What the hub knows of one rank."""

    rank: int = -1  # until it has introduced itself
    entered: int = 0  # waits for others, so far
    waited_s: float = -1.0  # in the present one; negative: it does not wait
    place: str = ""
    heard: float = field(default_factory=time.monotonic)
    state: str = "here"  # or left, gone, failed

    @property
    def answers(self) -> bool:
        return self.state == "here" and time.monotonic() - self.heard < SILENT_S

    @property
    def waits(self) -> bool:
        return self.answers and self.waited_s >= 0


class Standstill:
    """Notices that this process itself was stopped for a while, by Ctrl-Z, a scheduler or a paused machine: that is nobody's delay."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def over(self) -> float:
        """Seconds for which the thread that asks here several times a second was not able to."""
        now = time.monotonic()
        gap, self._last = now - self._last, now
        return gap if gap > SILENT_S else 0.0


class Hub:
    """Runs on rank 0 until rank 0 leaves."""

    def __init__(self, host: str, world_size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.key = secrets.token_hex(8)
        self._listener = _listen(host)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers = [Peer(rank) for rank in range(world_size)]
        self._lines: dict[Line, Peer] = {}
        self._over = False
        self._stops: set[int] = set()  # requests that everybody has heard of
        self._silent: list[tuple[int, str, int]] = []  # rank, its words and status: ends that nobody has told the user of
        self._due = 0.0
        self._leaving: float | None = None
        self.local, there = socket.socketpair()  # rank 0's own connection
        self._greet(there)
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def leave(self) -> None:
        """Tell the others that this end is meant, and wait until they know."""
        self._leaving = time.monotonic()
        self._thread.join(LEAVE_S + 2 * TICK_S)

    def _run(self) -> None:
        told, judged, ticked, standstill = False, 0.0, 0.0, Standstill()
        while True:
            ready = self._selector.select(TICK_S)
            stood = standstill.over()
            for peer in self._peers:
                peer.heard += stood
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now - judged > TICK_S / 2:  # not after each of many ranks' messages
                self._judge(now)
                judged = now
            if self._leaving is None:
                if now - ticked > SILENT_S / 3:
                    self._tell({"here": True})
                    ticked = now
                continue
            if not told:
                self._tell({"left": True})
                told = True
            if not self._lines or now - self._leaving > LEAVE_S:
                break
        for line in list(self._lines):
            self._drop(line)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it may have gone away in between
            self._greet(self._listener.accept()[0])

    def _greet(self, connection: socket.socket) -> None:
        line = Line(connection)
        self._lines[line] = Peer()
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()
        del self._lines[line]

    def _hear(self, line: Line) -> None:
        messages, peer = line.receive(), self._lines[line]
        for message in messages or ():
            if peer.rank >= 0:
                self._heed(peer, message)
            elif message.get("key") == self.key and message.get("rank") in range(len(self._peers)):
                peer = self._lines[line] = self._peers[message["rank"]]
                peer.heard = time.monotonic()
            else:
                messages = None  # a stranger
                break
        if messages is None:
            self._drop(line)
            if peer.rank >= 0 and peer.state == "here":
                peer.state = "gone"
                self._ended_silently(peer.rank, "", 1)

    def _heed(self, peer: Peer, message: Message) -> None:
        peer.heard = time.monotonic()
        if "beat" in message:
            peer.entered, peer.waited_s, peer.place = message["beat"]
        elif "left" in message:
            peer.state = "left"
        elif "failed" in message:
            peer.state = "failed"
            if message["spoken"]:
                self._end(message["failed"], message["status"])
            else:
                self._ended_silently(peer.rank, message["failed"], message["status"])
        elif "stop" in message:
            if message["why"] and not self._stops:
                say(message["why"])
            if message["stop"] not in self._stops:
                self._stops.add(message["stop"])
                self._tell({"stop": message["stop"]})

    def _ended_silently(self, rank: int, words: str, status: int) -> None:
        self._due = self._due if self._silent else time.monotonic() + SETTLE_S
        self._silent.append((rank, words, status))

    def _judge(self, now: float) -> None:
        if self._over:
            return
        if self._silent and now > self._due:
            _, words, status = next((end for end in self._silent if end[1]), (0, "", 1))
            words = words or f"{named([rank for rank, *_ in self._silent])} gone (killed, or its host is down)"
            say(f"error: {words}")
            self._end(words, status)
        late = [peer for peer in self._peers if peer.waits and peer.waited_s + now - peer.heard > self.timeout_s]
        if late and not self._over:
            speaker = next(peer for peer in self._peers if peer.waits)
            self._end(hang(self._peers, self.timeout_s), 1, speaker.rank, patient=False)

    def _end(self, words: str, status: int, speaker: int = -1, patient: bool = True) -> None:
        """The verdict. Not patient: the main threads are known to be stuck."""
        if not self._over:
            self._over = True
            self._tell({"end": words, "status": status, "speaker": speaker, "patient": patient})

    def _tell(self, message: Message) -> None:
        for line, peer in self._lines.items():
            if peer.rank >= 0:
                line.send(message)


def hang(peers: Sequence[Peer], timeout_s: float) -> str:
    """Who does not come, and where everybody is."""
    waiting = [peer for peer in peers if peer.waits]
    furthest = max(peer.entered for peer in waiting)
    absent = [peer for peer in peers if not peer.waits]
    # Ranks that entered as many waits as the others have been in this one and are past it: somebody else holds it up.
    missing = [peer for peer in absent if not peer.answers or peer.entered < furthest] or absent
    if not missing:
        places = "; ".join(f"rank {peer.rank} at {peer.place}" for peer in waiting)
        return f"the ranks wait for each other for longer than timeout_s={timeout_s:g} s: {places}"
    first = missing[0]
    if first.state == "left":
        doing = "has ended already"
    elif first.answers:
        doing = f"is at {first.place}"
    else:
        doing = f"no longer answers (stopped, or its host is down); it was last at {first.place}"
    who = "it" if len(missing) == 1 else f"rank {first.rank}"
    ranks = named([peer.rank for peer in missing], verb=False)
    return f"{ranks} did not come within timeout_s={timeout_s:g} s: {who} {doing}; the others wait at {waiting[0].place}"


def named(ranks: Sequence[int], verb: bool = True) -> str:
    """`rank 1 is`, `ranks 1, 2 are`."""
    one = len(ranks) == 1
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'' if one else 's'} {numbers}" + ((" is" if one else " are") if verb else "")


def _messages(lines: Sequence[bytes]) -> Iterator[Message]:
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        yield message if isinstance(message, dict) else {}


def _listen(host: str) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    # A name may mean a loopback address here and the network's elsewhere, so only what is surely local is bound alone.
    alone = host == "localhost" or place[0] in ("127.0.0.1", "::1")
    listener = socket.create_server((place[0] if alone else "", 0), family=family, backlog=1024)
    _open.add(listener)
    return listener


def _close_all() -> None:
    """A forked child must not keep a connection open that its parent's death would close."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_all)
