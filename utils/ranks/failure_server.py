"""Where the ranks' watch threads meet: a small server in a thread of rank 0 that decides why a run ends, and tells everybody.

The first verdict counts. A rank that dies closes its connection, which is noticed at once; a rank that leaves in good order, or
fails with an error, says so on the same connection before. Anybody who reaches the port may connect, but only who knows the key
is listened to, and nothing that arrives ends the thread.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from utils.ranks.connection import LONGEST, Connection, Message, closed_in_children
from utils.ranks.signals import STATUS, end_now, say

TICK_S = 0.2
SILENT_S = 2.5  # a watch thread tells something twice a second; one that has not for so long is not running
SETTLE_S = 0.3  # before a silent end is told: of several killed at once all are named, and one that speaks for itself is heard
LEAVE_S = 5.0  # how long rank 0 waits for the others to hear that it leaves
INTRODUCE_S = 5.0  # how long whoever connects may take to say who it is
STRANGERS = 64  # connections that have not said it, beside those of ranks that are still to come
INTRODUCTION = 1024  # bytes of what a stranger may say


@dataclass
class Peer:
    """What the hub knows of one rank."""

    rank: int = -1  # until it has introduced itself
    entered: int = 0  # waits for others, so far
    waited_s: float = -1.0  # in the present one; negative: it does not wait
    place: str = ""
    heard: float = field(default_factory=time.monotonic)
    state: str = "here"  # or expected (it has not come yet), left, gone, failed

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

    def __init__(self, address: str, world_size: int, timeout_s: float, key: str) -> None:
        self.timeout_s = timeout_s
        self._key = key
        self._listener = listen(address)
        self._listener.setblocking(False)  # whoever was there to be accepted may be gone again
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers = [Peer(rank, state="expected") for rank in range(world_size)]
        self._connections: dict[Connection, Peer] = {}  # oldest first
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
        """Without this thread no hang and no death would be noticed: should it fail after all, the run ends, aloud."""
        try:
            self._serve()
        except Exception as error:
            words = f"the watch over all ranks has failed on rank 0 ({type(error).__name__}: {error})"
            say(f"error: {words}")
            with suppress(Exception):
                self._end(words, 1, patient=False)
            time.sleep(SETTLE_S)  # the others hear it before their connections end
            end_now(1)

    def _serve(self) -> None:
        told, judged, ticked, standstill = False, 0.0, 0.0, Standstill()
        while True:
            ready = self._selector.select(TICK_S)
            stood = standstill.over()
            for peer in (*self._peers, *(self._connections[stranger] for stranger in self._strangers())):
                peer.heard += stood
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:  # it may have had to make room
                    self._hear(key.data)
            now = time.monotonic()
            if now - judged > TICK_S / 2:  # not after each of many ranks' messages
                self._turn_away(now)
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
            if not any(peer.rank >= 0 for peer in self._connections.values()) or now - self._leaving > LEAVE_S:
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

    def _turn_away(self, now: float) -> None:
        for connection in self._strangers():
            if now - self._connections[connection].heard > INTRODUCE_S:
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection]

    def _hear(self, connection: Connection) -> None:
        messages, peer = connection.receive(), self._connections[connection]
        for message in messages or ():
            if peer.rank >= 0:
                with suppress(KeyError, TypeError, ValueError, OverflowError):  # it is no message of ours
                    self._heed(peer, message)
            elif (known := self._introduced(connection, message)) is not None:
                peer = known
            else:
                messages = None  # a stranger
                break
        if messages is None:
            self._drop(connection)
            if peer.rank >= 0 and peer.state == "here":
                peer.state = "gone"
                self._ended_silently(peer.rank, "", 1)

    def _introduced(self, connection: Connection, message: Message) -> Peer | None:
        """The rank that a first message is from, if it is one and its sender knows the key."""
        key, rank = message.get("key"), message.get("rank")
        if not (isinstance(key, str) and hmac.compare_digest(key.encode(errors="replace"), self._key.encode())):
            return None
        if type(rank) is not int or not 0 <= rank < len(self._peers):
            return None
        peer = self._peers[rank]
        if peer.state != "expected":
            words = f"a second process is rank {rank}; give each process its own number"
            connection.send({"end": words, "status": 2, "speaker": rank, "patient": True})
            return None
        peer.state, peer.heard = "here", time.monotonic()
        del self._connections[connection]
        self._connections[connection] = peer
        connection.longest = LONGEST
        return peer

    def _heed(self, peer: Peer, message: Message) -> None:
        peer.heard = time.monotonic()
        if "beat" in message:
            entered, waited_s, place = message["beat"]
            peer.entered, peer.waited_s, peer.place = int(entered), float(waited_s), str(place)
        elif "left" in message:
            peer.state = "left"
        elif "failed" in message:
            peer.state = "failed"
            words, status = str(message["failed"]), int(message["status"])
            if message["spoken"]:
                self._end(words, status)
            else:
                self._ended_silently(peer.rank, words, status)
        elif message.get("stop") in STATUS:
            if message["why"] and not self._stops:
                say(str(message["why"]))
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
    if first.state == "left":
        doing = "has ended already"
    elif first.state == "expected":
        doing = "has not come at all"
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


def listen(address: str) -> socket.socket:
    """A port of its own at an address of this host; at all of them where none is given."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024)
    closed_in_children(listener)
    return listener
