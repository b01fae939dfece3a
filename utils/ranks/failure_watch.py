"""A thread beside the main thread of every rank, so that all ranks fail together and stop together.

It tells the hub on rank 0 (see failure_server.py) twice a second whether this rank waits for others and where it is, and acts
on what the hub knows: another rank has failed, is gone or does not come, or somebody asks for a stop. A main thread that is blocked in a
collective cannot do that itself.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import SIGTERM
from types import FrameType

from utils.files import ROOT
from utils.ranks import signals
from utils.ranks.connection import Connection, Message
from utils.ranks.failure_server import SILENT_S, Hub, Standstill
from utils.ranks.launchers import Launch

BEAT_S = 0.5
GRACE_S = 5.0  # how long the main thread may take to end by itself once it is known that the run is over
STUCK_S = 2.0  # the same where it waits for others, which no longer come
HIDDEN = ("utils/ranks/failure_watch.py", "utils/ranks/distributed.py")  # where waiting happens, but never why


@dataclass(frozen=True)
class Cause:
    """Why the run is over. Whoever found out has said it already."""

    text: str
    status: int = 1
    linger_s: float = 0.3  # before this rank may leave, too


class Watch:
    """What the main thread sees of it; with `hub` on rank 0."""

    def __init__(self, connection: Connection, launch: Launch, timeout_s: float, name: str, hub: Hub | None = None) -> None:
        self.timeout_s = timeout_s
        self.last_words: list[Callable[[str], None]] = []  # called with the cause before a hard exit
        self._connection, self._launch, self._name, self._hub = connection, launch, name, hub
        self._process, self._main = os.getpid(), threading.main_thread().ident
        self._depth, self._entered, self._since = 0, 0, 0.0
        self._heard = time.monotonic()
        self._told_stop = 0
        self._orphaned: float | None = None
        self._wondering = self._left = self._main_is_leaving = False
        self._patient = True
        self._cause: Cause | None = None
        self._known = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @classmethod
    def join(cls, host: str, port: int, key: str, launch: Launch, timeout_s: float, hub: Hub | None) -> Watch:
        """Connect to the hub, of which rank 0 has told the place; rank 0 has it in its own process."""
        connected = hub.local if hub is not None else socket.create_connection((host, port), timeout=min(30.0, timeout_s))
        connection = Connection(connected)
        connection.send({"key": key, "rank": launch.rank})
        return cls(connection, launch, timeout_s, f"{host}:{port}", hub)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave in good order: others will not miss this rank. More than once does no harm."""
        if self._main_is_leaving or os.getpid() != self._process:
            return
        self._main_is_leaving = True
        self._connection.send({"left": True})
        self._connection.finish()
        if self._hub is not None:
            self._hub.leave()
        self._thread.join(SILENT_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around everything that blocks on other ranks."""
        if threading.get_ident() != self._main:
            yield
            return
        if self._depth == 0:
            self._entered, self._since = self._entered + 1, time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def tell_failure(self, text: str, status: int = 1, spoken: bool = True) -> None:
        """This rank ends the run, with this exit status; what it has not told the user itself is told on rank 0."""
        self._connection.send({"failed": text[:2000], "status": status, "spoken": spoken})

    @property
    def cause(self) -> Cause | None:
        """Why the run is over, if that is known here."""
        return self._cause

    def why(self, within_s: float) -> Cause | None:
        """Why others are gone, as soon as it is known."""
        self._wondering = True
        with self._known:
            self._known.wait_for(lambda: self._cause is not None, within_s)
        return self._cause

    def _run(self) -> None:
        """Without this thread the rank would wait for ever for others that are gone: should it fail, the rank ends, aloud."""
        try:
            self._listen()
        except Exception as error:
            signals.say(f"error on rank {self._launch.rank}: its watch over the others has failed ({type(error).__name__}: {error})")
            signals.end_now(1)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._connection.socket, selectors.EVENT_READ)
        due, standstill = 0.0, Standstill()
        while self._cause is None:
            ready = selector.select(max(0.0, due - time.monotonic()))
            if stood := standstill.over():
                self._stood_still(stood)
            if ready and not self._receive():
                break
            now = time.monotonic()
            if now >= due:
                due = now + BEAT_S
                self._connection.send({"beat": [self._entered, self._waited_s(now), self._place()]})
                self._spread(now)
                self._doubt(now)
        selector.close()
        self._connection.socket.close()
        if self._cause is not None:
            self._finish(self._cause)

    def _stood_still(self, seconds: float) -> None:
        self._since = min(self._since + seconds, time.monotonic())  # a wait may have begun just now
        self._heard += seconds
        if self._orphaned is not None:
            self._orphaned += seconds

    def _receive(self) -> bool:
        """Heed what the hub says; False when there is nothing more to come."""
        messages = self._connection.receive()
        self._heard = time.monotonic()
        for message in messages or ():
            self._heed(message)
        if messages is None and self._cause is None and not (self._left or self._main_is_leaving):
            self._rank_0_is_lost("rank 0 is gone (killed, or its host is down)")
        return messages is not None and not self._left

    def _heed(self, message: Message) -> None:
        if "end" in message:
            if message["speaker"] == self._launch.rank:
                signals.say(f"error: {message['end']}")
            self._conclude(Cause(message["end"], message["status"]), patient=message["patient"])
        elif "stop" in message:
            self._told_stop = message["stop"]
            signals.ask(message["stop"])
        elif "left" in message:
            self._left = True
            self._connection.finish()

    def _conclude(self, cause: Cause, patient: bool = True) -> None:
        self._patient = patient
        with self._known:
            self._cause = cause
            self._known.notify_all()

    def _spread(self, now: float) -> None:
        """Requests to stop go from one rank to all; that the launcher is gone is one."""
        if self._orphaned is None and self._launch.orphaned:
            self._orphaned = now
            why = f"{self._launch.launcher}, which started rank {self._launch.rank}, is gone: saving, then stopping"
            self._connection.send({"stop": SIGTERM, "why": why})
            signals.ask(SIGTERM)
        if self._orphaned is not None and now - self._orphaned > self.timeout_s:
            self._end_now(Cause("the launcher is gone, and the run did not stop", signals.STATUS[SIGTERM]))
        if (asked := signals.asked()) and asked != self._told_stop:
            self._told_stop = asked
            self._connection.send({"stop": asked, "why": ""})

    def _doubt(self, now: float) -> None:
        """Rank 0 itself may be what does not answer."""
        waits_too_long = self._waited_s(now) > self.timeout_s + 1
        if (self._wondering or waits_too_long) and now - self._heard > SILENT_S and self._hub is None:
            late = f"did not come within timeout_s={self.timeout_s:g} s: it no longer answers"
            here = f"; the others wait at {self._place()}" if waits_too_long else ""
            self._rank_0_is_lost(f"rank 0 {late if waits_too_long else 'no longer answers'} (stopped, or its host is down){here}", False)

    def _rank_0_is_lost(self, words: str, patient: bool = True) -> None:
        """Without the hub, ranks of one host agree on who speaks by a name that only one of them can take."""
        time.sleep(min(self._launch.rank - 1, 5) * 0.2)  # the lowest first; it holds the name while it waits for its main thread
        self._name_taken = socket.socket(socket.AF_UNIX)
        try:
            self._name_taken.bind(f"\0lockstep {self._name}")
            speaks = True
        except OSError as error:
            speaks = error.errno != errno.EADDRINUSE
        if speaks:
            signals.say(f"error: {words}")
        self.tell_failure(words)  # should rank 0 go on after all, it will find this
        self._conclude(Cause(words, linger_s=1.5), patient)

    def _finish(self, cause: Cause) -> None:
        """The main thread hears of it by itself, as a rule; where it does not, the process ends here."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < (GRACE_S if self._patient else 1.0):
            if self._main_is_leaving or (passed > STUCK_S and self._waited_s(time.monotonic()) > STUCK_S):
                break
            time.sleep(0.1)
        if not self._main_is_leaving:
            self._end_now(cause)

    def _end_now(self, cause: Cause) -> None:
        def last_words() -> None:
            for speak in self.last_words:
                with suppress(Exception):  # each has its chance
                    speak(cause.text)

        signals.end_now(cause.status, last_words)

    def _waited_s(self, now: float) -> float:
        """Seconds of the present wait for others, or -1."""
        return now - self._since if self._depth else -1.0

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        try:
            return place(frame)
        finally:
            del frame  # what a frame refers to, tensors too, lives as long as somebody holds it


def place(frame: FrameType | None) -> str:
    """Where a thread is: its innermost line of this repository, and the one of pretrain.py that led there."""
    inner = outer = nowhere = ""
    while frame is not None:
        file = frame.f_code.co_filename
        line = f"{frame.f_lineno} in {frame.f_code.co_name}"
        nowhere = nowhere or f"{os.path.basename(file)}:{line}"
        if file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file:
            name = os.path.relpath(file, ROOT)
            if name not in HIDDEN:
                inner = inner or f"{name}:{line}"
            if name == "pretrain.py":
                outer = outer or f"{name}:{line}"
        frame = frame.f_back
    return f"{inner} ({outer})" if outer and outer != inner else inner or nowhere
