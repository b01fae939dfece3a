"""The failure server, a thread of rank 0: it alone decides why the run ends, prints that once, and
tells all ranks.

The watch of each rank (see failure_watch.py) holds a connection to it. A rank that dies closes its
connection, which is noticed at once; a rank that leaves in good order, or fails with an error, says
so on the connection first. Nothing that arrives ends the thread, and once all ranks have come
nobody else can connect.
"""

from __future__ import annotations

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
from utils.ranks.signals import end_now, say

TICK_S = 0.2
WORD_S = 5.0  # how long ranks may be late before the user hears of it
SILENT_S = 2.5  # a watch reports twice a second; after this time it is taken to be stopped
# How long a report waits for better ones. Other ranks may find the same; ranks that are killed
# together are named together; what one rank's end did to another is for the first to explain.
PATIENCE_S = {PRINTED: 0.0, FOUND: 1.0, ENDED: 0.3, ECHO: 5.0}
LEAVE_S = 5.0  # how long rank 0 waits for the others to hear that it leaves
INTRODUCTION = 1024  # bytes that are read from a connection before it says which rank it is


@dataclass
class Peer:
    """The server's view of one rank."""

    rank: int = -1  # until it has introduced itself
    entered: int = 0  # waits for others, so far
    waited_s: float = -1.0  # in the present wait; negative: it does not wait
    location: str = ""  # the line of code that it is at
    heard: float = field(default_factory=time.monotonic)
    state: str = "here"  # or expected (it has not come yet), left, failed

    @property
    def answers(self) -> bool:
        return self.state == "here" and time.monotonic() - self.heard < SILENT_S

    @property
    def waits(self) -> bool:
        return self.answers and self.waited_s >= 0


class Standstill:
    """Notices that this process itself was suspended, by Ctrl-Z or a scheduler: that is nobody's
    delay.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def over(self) -> float:
        """Seconds since the last call if they are too many; call it several times a second."""
        now = time.monotonic()
        gap, self._last = now - self._last, now
        return gap if gap > SILENT_S else 0.0


class FailureServer:
    """Runs on rank 0 until all ranks have left, or have heard why the run ends."""

    def __init__(
        self, listeners: Sequence[socket.socket], world_size: int, timeout_s: float, where: str
    ) -> None:
        """`where` tells the user at which address the ranks meet."""
        self.timeout_s, self._where = timeout_s, where
        self._listeners = list(listeners)
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            closed_in_children(listener)
            listener.setblocking(False)  # a connection may be gone before it is accepted
            self._selector.register(listener, selectors.EVENT_READ)
        self._peers = [Peer(rank, state="expected") for rank in range(world_size)]
        self._connections: dict[Connection, Peer] = {}
        # with their ranks; the report of a rank that vanished has no text
        self._reports: list[tuple[int, Failure]] = []
        self._due = math.inf  # when the reports are judged
        self._began, self._word_given = time.monotonic(), False
        self._leaving = False
        self._verdict: Message = {}  # why the run ends
        self._ends = math.inf  # when this thread stops waiting for the others
        self.local, there = socket.socketpair()  # rank 0's own connection
        self._greet(there)
        self._thread = threading.Thread(target=self._run, name="failure server", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell the others that rank 0 leaves in good order, and wait until they know."""
        self._leaving = True
        self.wait(LEAVE_S + 2 * TICK_S)

    def wait(self, within_s: float) -> None:
        """Wait until all ranks have heard why the run ends."""
        self._thread.join(within_s)

    def _run(self) -> None:
        """Without this thread nobody would notice a hang or a death: if it fails, the run ends."""
        try:
            self._serve()
        except Exception as error:
            failure = Failure(
                f"the watch over all ranks has failed on rank 0 ({type(error).__name__}: {error})"
            )
            say(failure.message())
            with suppress(Exception):
                self._end(failure.text, 1, patient=False)
            time.sleep(TICK_S)  # the others hear it before their connections end
            end_now(1)

    def _serve(self) -> None:
        standstill, judged = Standstill(), 0.0
        while self._ends > time.monotonic():
            ready = self._selector.select(TICK_S)
            if stood := standstill.over():
                self._began += stood
                for peer in self._connections.values():
                    peer.heard += stood
            for key, _ in ready:
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now - judged > TICK_S / 2:  # not after each message of many ranks
                judged = now
                self._judge(now)
            if self._leaving and self._ends == math.inf:
                self._ends = now + LEAVE_S
                self._tell({"left": True})
            if self._ends < math.inf and all(peer.rank < 0 for peer in self._connections.values()):
                break
        self._close_door()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()

    def _accept(self, listener: object) -> None:
        assert isinstance(listener, socket.socket)
        try:
            connected, _ = listener.accept()
        except OSError:
            time.sleep(0.01)  # out of descriptors: the listener stays ready
            return
        self._greet(connected)

    def _greet(self, connected: socket.socket) -> None:
        connection = Connection(connected, longest=INTRODUCTION)
        self._connections[connection] = Peer()
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection]

    def _close_door(self) -> None:
        """Nobody else may connect, and those who have not introduced themselves go."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for connection in [one for one, peer in self._connections.items() if peer.rank < 0]:
            self._drop(connection)

    def _hear(self, connection: Connection) -> None:
        if connection not in self._connections:
            return  # dropped a moment ago
        messages, peer = connection.receive(), self._connections[connection]
        for message in messages or ():
            if peer.rank >= 0:
                # malformed messages are ignored
                with suppress(KeyError, TypeError, ValueError, OverflowError):
                    self._read(peer, message)
            elif (known := self._introduce(connection, message)) is not None:
                peer = known
            else:
                messages = None  # not one of our ranks
                break
        if messages is None:
            self._drop(connection)
            if peer.rank >= 0 and peer.state == "here" and not (self._verdict or self._leaving):
                self._add(peer, Failure("", kind=ENDED))
        elif messages:
            connection.send({"here": True})
        if self._listeners and not any(other.state == "expected" for other in self._peers):
            self._close_door()

    def _introduce(self, connection: Connection, message: Message) -> Peer | None:
        """The rank that a first message names, unless it is none or has come already."""
        rank = message.get("rank")
        if type(rank) is not int or not 0 <= rank < len(self._peers):
            return None
        peer = self._peers[rank]
        if peer.state != "expected":
            connection.send({"refused": f"{self._where}: rank {rank} is there already"})
            return None
        peer.state, peer.heard = "here", time.monotonic()
        self._connections[connection] = peer
        connection.longest = LONGEST
        if self._verdict:  # it comes late
            connection.send(self._verdict)
        return peer

    def _read(self, peer: Peer, message: Message) -> None:
        peer.heard = time.monotonic()
        if "beat" in message:
            entered, waited_s, location = message["beat"]
            peer.entered, peer.waited_s, peer.location = (
                int(entered),
                float(waited_s),
                str(location),
            )
        elif "left" in message:
            peer.state = "left"
        elif "failed" in message:
            self._add(peer, Failure.from_row(message["failed"]))

    def _add(self, peer: Peer, failure: Failure) -> None:
        """Note a report, to be judged when better ones have had their time."""
        peer.state = "failed"
        self._reports.append((peer.rank, failure))
        self._due = min(self._due, time.monotonic() + PATIENCE_S[failure.kind])

    def _judge(self, now: float) -> None:
        if self._verdict:
            return
        if self._reports:
            if now >= self._due or not any(peer.state == "here" for peer in self._peers):
                self._decide()
            return
        if missing := [peer.rank for peer in self._peers if peer.state == "expected"]:
            self._miss(f"{named(missing)} of {len(self._peers)}", now - self._began)
        elif any(
            peer.waits and peer.waited_s + now - peer.heard > self.timeout_s for peer in self._peers
        ):
            self._announce(Failure(hang(self._peers, self.timeout_s)))

    def _miss(self, ranks: str, waited_s: float) -> None:
        if waited_s > self.timeout_s:
            line = (
                f"{self._where}: {ranks} did not come within timeout_s={self.timeout_s:g} s; check"
                " that all ranks run and see one address"
            )
            self._announce(Failure(line, 2))
        elif waited_s > WORD_S and not self._word_given:
            self._word_given = True
            say(f"waiting for {ranks} at {self._where}")

    def _announce(self, failure: Failure) -> None:
        """End the run by what the server itself has found."""
        self._end(failure.text, failure.status, patient=False)
        say(failure.message())

    def _decide(self) -> None:
        """Print the best report, the first of equals, and end the run by it."""
        rank, best = min(
            self._reports, key=lambda report: (KINDS.index(report[1].kind), not report[1].text)
        )
        alike = {other for other, failure in self._reports if failure.text == best.text}
        if not best.text:
            are = "is" if len(alike) == 1 else "are"
            gone = f"{named(sorted(alike))} {are} gone (killed, or its host is down)"
            best = Failure(gone, kind=ENDED)
        self._end(best.text, best.status)  # before printing: a terminal may take no output
        # one line from rank 0 is about the run, not about that rank
        own = len(alike) == 1 and best.kind in (FOUND, ECHO) and (rank > 0 or best.trace)
        if best.kind != PRINTED:
            say(best.message(f" on rank {rank}" if own else ""))

    def _end(self, words: str, status: int, patient: bool = True) -> None:
        """Tell all ranks. Not patient: their main threads are known to be stuck."""
        self._verdict = {"end": words, "status": status, "patient": patient}
        self._ends = time.monotonic() + LEAVE_S
        self._tell(self._verdict)

    def _tell(self, message: Message) -> None:
        for connection, peer in self._connections.items():
            if peer.rank >= 0:
                connection.send(message)


def hang(peers: Sequence[Peer], timeout_s: float) -> str:
    """Which ranks do not come, and where all ranks are."""
    waiting = [peer for peer in peers if peer.waits]
    furthest = max(peer.entered for peer in waiting)
    absent = [peer for peer in peers if not peer.waits]
    # A rank that has entered as many waits as the others is past the wait they are in: another rank
    # holds them up.
    missing = [peer for peer in absent if not peer.answers or peer.entered < furthest] or absent
    if not missing:
        places = "; ".join(f"rank {peer.rank} at {peer.location}" for peer in waiting)
        return f"the ranks wait for each other for longer than timeout_s={timeout_s:g} s: {places}"
    first = missing[0]
    silent = f"no longer answers (stopped, or its host is down); it was last at {first.location}"
    known = {"left": "has ended already", "expected": "has not come at all"}
    doing = known.get(first.state) or (f"is at {first.location}" if first.answers else silent)
    who = "it" if len(missing) == 1 else f"rank {first.rank}"
    ranks = named([peer.rank for peer in missing])
    return (
        f"{ranks} did not come within timeout_s={timeout_s:g} s: {who} {doing}; the others wait at"
        f" {waiting[0].location}"
    )


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
