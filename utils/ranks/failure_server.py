"""The failure server, a thread of rank 0: ranks report to it, and it alone decides why the run ends, prints that once, and tells all.

The watch of each rank (see failure_watch.py) holds a connection to it. A rank that dies closes its connection, which is noticed at
once; a rank that leaves in good order, or fails with an error, says so on the same connection before. Anybody who reaches the port
may connect, but only who knows the key is listened to, and nothing that arrives ends the thread.
"""

from __future__ import annotations

import hmac
import math
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from utils.ranks.connection import LONGEST, Connection, Message, closed_in_children
from utils.ranks.failure import ECHO, ENDED, FOUND, KINDS, PRINTED, Failure
from utils.ranks.signals import STATUS, end_now, say

TICK_S = 0.2
SILENT_S = 2.5  # a watch reports twice a second; one that has not for so long is not running
# How long a report waits for better ones: others may have found the same; of several killed at once all are named, and who
# ends all ranks when one has gone does so soon; what another's end did to a rank is for that one to explain.
PATIENCE_S = {PRINTED: 0.0, FOUND: 1.0, ENDED: 0.3, ECHO: 5.0}
LEAVE_S = 5.0  # how long rank 0 waits for the others to hear that it leaves
INTRODUCE_S = 5.0  # how long whoever connects may take to say who it is
STRANGERS = 64  # connections that have not said it, beside those of ranks that are still to come
INTRODUCTION = 1024  # bytes of what a stranger may say


@dataclass
class Peer:
    """What the server knows of one rank."""

    rank: int = -1  # until it has introduced itself
    entered: int = 0  # waits for others, so far
    waited_s: float = -1.0  # in the present one; negative: it does not wait
    place: str = ""
    heard: float = field(default_factory=time.monotonic)
    state: str = "here"  # or expected (it has not come yet), left, failed (without a word: gone)

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


class FailureServer:
    """Runs on rank 0 until all ranks have left, or have heard why the run ends."""

    def __init__(self, address: str, world_size: int, timeout_s: float, key: str) -> None:
        self.timeout_s = timeout_s
        self._key = key
        # a port of its own at an address of this host; at all of them where none is given
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        closed_in_children(self._listener)
        self._listener.setblocking(False)  # whoever was there to be accepted may be gone again
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers = [Peer(rank, state="expected") for rank in range(world_size)]
        self._connections: dict[Connection, Peer] = {}  # oldest first
        self._reports: list[tuple[int, Failure]] = []  # with their ranks; one without words is that of a rank that vanished
        self._due = math.inf  # when they are judged
        self._stops: set[int] = set()  # requests that everybody has heard of
        self._leaving = False
        self._verdict: Message = {}  # once it is decided why the run ends
        self._ends = math.inf  # when this thread waits for nobody any more
        self.local, there = socket.socketpair()  # rank 0's own connection
        self._greet(there)
        self._thread = threading.Thread(target=self._run, name="failure server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def leave(self) -> None:
        """Tell the others that this end is meant, and wait until they know."""
        self._leaving = True
        self.wait(LEAVE_S + 2 * TICK_S)

    def wait(self, within_s: float) -> None:
        """Until everybody has heard why the run ends."""
        self._thread.join(within_s)

    def _run(self) -> None:
        """Without this thread no hang and no death would be noticed: should it fail after all, the run ends, aloud."""
        try:
            self._serve()
        except Exception as error:
            failure = Failure(f"the watch over all ranks has failed on rank 0 ({type(error).__name__}: {error})")
            say(failure.shown())
            with suppress(Exception):
                self._end(failure.text, 1, patient=False)
            time.sleep(TICK_S)  # the others hear it before their connections end
            end_now(1)

    def _serve(self) -> None:
        standstill, judged = Standstill(), 0.0
        while self._ends > time.monotonic():
            ready = self._selector.select(TICK_S)
            stood = standstill.over()
            for peer in self._connections.values():
                peer.heard += stood
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:  # it may have had to make room
                    self._hear(key.data)
            now = time.monotonic()
            if now - judged > TICK_S / 2:  # not after each of many ranks' messages
                judged = now
                for connection in self._strangers():
                    if now - self._connections[connection].heard > INTRODUCE_S:
                        self._drop(connection)
                self._judge(now)
            if self._leaving and self._ends == math.inf:
                self._ends = now + LEAVE_S
                self._tell({"left": True})
            if self._ends < math.inf and all(peer.rank < 0 for peer in self._connections.values()):
                break
        for connection in list(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # out of descriptors: the listener stays ready, and must not keep this thread busy
            return
        strangers = self._strangers()
        expected = sum(peer.state == "expected" for peer in self._peers)
        for connection in strangers[: max(0, len(strangers) + 1 - STRANGERS - expected)]:
            self._drop(connection)
        self._greet(connected)

    def _greet(self, connected: socket.socket) -> None:
        connection = Connection(connected, longest=INTRODUCTION)
        self._connections[connection] = Peer()
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _strangers(self) -> list[Connection]:
        return [connection for connection, peer in self._connections.items() if peer.rank < 0]

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection]

    def _hear(self, connection: Connection) -> None:
        messages, peer = connection.receive(), self._connections[connection]
        for message in messages or ():
            if peer.rank >= 0:
                with suppress(KeyError, TypeError, ValueError, OverflowError):  # it is no message of ours
                    self._read(peer, message)
            elif (known := self._introduced(connection, message)) is not None:
                peer = known
            else:
                messages = None  # a stranger
                break
        if messages is None:
            self._drop(connection)
            if peer.rank >= 0 and peer.state == "here" and not (self._verdict or self._leaving):
                self._add(peer, Failure("", kind=ENDED))
        elif messages:
            connection.send({"here": True})

    def _introduced(self, connection: Connection, message: Message) -> Peer | None:
        """The rank that a first message is from, if it is one and its sender knows the key."""
        key, rank = message.get("key"), message.get("rank")
        if not (isinstance(key, str) and hmac.compare_digest(key.encode(errors="replace"), self._key.encode())):
            return None
        if type(rank) is not int or not 0 <= rank < len(self._peers) or self._peers[rank].state != "expected":
            return None
        peer = self._peers[rank]
        peer.state, peer.heard = "here", time.monotonic()
        del self._connections[connection]
        self._connections[connection] = peer
        connection.longest = LONGEST
        if self._verdict:  # it comes late
            connection.send(self._verdict)
        return peer

    def _read(self, peer: Peer, message: Message) -> None:
        peer.heard = time.monotonic()
        if "beat" in message:
            entered, waited_s, place = message["beat"]
            peer.entered, peer.waited_s, peer.place = int(entered), float(waited_s), str(place)
        elif "left" in message:
            peer.state = "left"
        elif "failed" in message:
            self._add(peer, Failure.from_row(message["failed"]))
        elif message.get("stop") in STATUS:
            if message["why"] and not self._stops:
                say(str(message["why"]))
            if message["stop"] not in self._stops:
                self._stops.add(message["stop"])
                self._tell({"stop": message["stop"]})

    def _add(self, peer: Peer, failure: Failure) -> None:
        """A report, to be judged when better ones have had their time."""
        peer.state = "failed"
        self._reports.append((peer.rank, failure))
        self._due = min(self._due, time.monotonic() + PATIENCE_S[failure.kind])

    def _judge(self, now: float) -> None:
        if self._verdict:
            return
        if self._reports:
            if now >= self._due or not any(peer.state == "here" for peer in self._peers):
                self._decide()
        elif any(peer.waits and peer.waited_s + now - peer.heard > self.timeout_s for peer in self._peers):
            failure = Failure(hang(self._peers, self.timeout_s))
            self._end(failure.text, 1, patient=False)
            say(failure.shown())

    def _decide(self) -> None:
        """Print the best report, of equals the first, and end the run by it."""
        rank, best = min(self._reports, key=lambda report: (KINDS.index(report[1].kind), not report[1].text))
        alike = {other for other, failure in self._reports if failure.text == best.text}
        if not best.text:
            best = Failure(f"{named(sorted(alike))} {'is' if len(alike) == 1 else 'are'} gone (killed, or its host is down)", kind=ENDED)
        self._end(best.text, best.status)  # first: a terminal may take no output
        if best.kind != PRINTED:
            say(best.shown(f" on rank {rank}" if best.kind in (FOUND, ECHO) and len(alike) == 1 else ""))

    def _end(self, words: str, status: int, patient: bool = True) -> None:
        """Tell everybody. Not patient: the main threads are known to be stuck."""
        self._verdict, self._ends = {"end": words, "status": status, "patient": patient}, time.monotonic() + LEAVE_S
        self._tell(self._verdict)

    def _tell(self, message: Message) -> None:
        for connection, peer in self._connections.items():
            if peer.rank >= 0:
                connection.send(message)


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
    silent = f"no longer answers (stopped, or its host is down); it was last at {first.place}"
    known = {"left": "has ended already", "expected": "has not come at all"}
    doing = known.get(first.state) or (f"is at {first.place}" if first.answers else silent)
    who = "it" if len(missing) == 1 else f"rank {first.rank}"
    ranks = named([peer.rank for peer in missing])
    return f"{ranks} did not come within timeout_s={timeout_s:g} s: {who} {doing}; the others wait at {waiting[0].place}"


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
