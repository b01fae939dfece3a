"""A thread beside the main thread of every rank, so that all ranks fail together and stop together.

It reports to the failure server on rank 0 (see failure_server.py) twice a second whether this rank waits for others and where it is,
and acts on what that answers: the run is over, or somebody asks for a stop. A main thread that is blocked in a collective cannot do
that itself.
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
from signal import SIGTERM
from types import FrameType

from utils.files import ROOT
from utils.ranks import signals
from utils.ranks.connection import Connection, Message
from utils.ranks.failure import ECHO, FOUND, LINGER_S, PRINTED, Failure
from utils.ranks.failure_server import PATIENCE_S, SILENT_S, FailureServer, Standstill
from utils.ranks.launchers import Launch

BEAT_S = 0.5
ANSWER_S = PATIENCE_S[ECHO] + 5.0  # the failure server has decided by then, or cannot be reached
GRACE_S = 5.0  # how long the main thread may take to end by itself once it is known that the run is over
STUCK_S = 2.0  # the same where it waits for others, which no longer come
HIDDEN = ("utils/ranks/failure_watch.py", "utils/ranks/distributed.py")  # where waiting happens, but never why


class Watch:
    """What the main thread sees of it; with `server` on rank 0."""

    def __init__(self, host: str, port: int, key: str, launch: Launch, timeout_s: float, server: FailureServer | None = None) -> None:
        """Connect to the failure server, at a place that the others know from rank 0; rank 0 has it in its own process."""
        self.timeout_s = timeout_s
        self.last_words: list[Callable[[str], None]] = []  # called with the cause before a hard exit
        self.reported: Failure | None = None  # by this rank
        self.cause: Failure | None = None  # of the run's end, as soon as it is known here; the user has read it
        self._connection = Connection(server.local if server else socket.create_connection((host, port), timeout=min(30.0, timeout_s)))
        self._connection.send({"key": key, "rank": launch.rank})
        self._launch, self._name, self._server = launch, f"{host}:{port}", server
        self._process, self._main = os.getpid(), threading.main_thread().ident
        self._depth, self._entered, self._since = 0, 0, 0.0
        self._heard = time.monotonic()
        self._passed_on = 0  # the request to stop that the others know of
        self._orphaned: float | None = None
        self._server_left = self._main_is_leaving = False
        self._concluded, self._patient = 0.0, True
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave in good order: others will not miss this rank. More than once does no harm."""
        if self._main_is_leaving or os.getpid() != self._process:
            return
        self._main_is_leaving = True
        self._connection.send({"left": True})
        self._connection.finish()
        if self._server is not None:
            self._server.leave()
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

    def report(self, failure: Failure) -> None:
        """This rank cannot go on; the first report counts."""
        if self.reported is None:
            self.reported = failure
            self._connection.send({"failed": failure.row()})

    def wait_for_cause(self) -> Failure | None:
        """Why the run is over, once everybody has heard of it; None where the failure server does not answer."""
        if self._known.wait(ANSWER_S):
            wait_s = max(0.0, self._concluded + LINGER_S - time.monotonic())
            time.sleep(wait_s) if self._server is None else self._server.wait(wait_s)
        return self.cause

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
        while self.cause is None:
            ready = selector.select(max(0.0, due - time.monotonic()))
            if stood := standstill.over():
                self._stood_still(stood)
            if ready and not self._receive():
                break
            now = time.monotonic()
            if now >= due:
                due = now + BEAT_S
                self._connection.send({"beat": [self._entered, self._waited_s(now), self._place()]})
                self._pass_on(now)
                self._doubt(now)
        selector.close()
        self._connection.socket.close()
        if self.cause is not None:
            self._finish(self.cause)

    def _stood_still(self, seconds: float) -> None:
        self._since = min(self._since + seconds, time.monotonic())  # a wait may have begun just now
        self._heard += seconds
        if self._orphaned is not None:
            self._orphaned += seconds

    def _receive(self) -> bool:
        """Do what the failure server says; False when there is nothing more to come."""
        messages = self._connection.receive()
        self._heard = time.monotonic()
        for message in messages or ():
            self._obey(message)
        if messages is None and self.cause is None and not (self._server_left or self._main_is_leaving):
            self._rank_0_is_lost("rank 0 is gone (killed, or its host is down)")
        return messages is not None and not self._server_left

    def _obey(self, message: Message) -> None:
        if "end" in message:
            self._conclude(Failure(message["end"], message["status"]), patient=message["patient"])
        elif "stop" in message:
            self._passed_on = message["stop"]
            signals.ask(message["stop"])
        elif "left" in message:
            self._server_left = True
            self._connection.finish()

    def _conclude(self, cause: Failure, patient: bool = True) -> None:
        self._concluded, self._patient, self.cause = time.monotonic(), patient, cause
        self._known.set()

    def _pass_on(self, now: float) -> None:
        """Requests to stop go from one rank to all; that the launcher is gone is one."""
        if self._orphaned is None and self._launch.orphaned:
            self._orphaned = now
            why = f"{self._launch.launcher}, which started rank {self._launch.rank}, is gone: saving, then stopping"
            self._connection.send({"stop": SIGTERM, "why": why})
            signals.ask(SIGTERM)
        if self._orphaned is not None and now - self._orphaned > self.timeout_s:
            self._end_now(Failure("the launcher is gone, and the run did not stop", signals.STATUS[SIGTERM]))
        if (asked := signals.asked()) and asked != self._passed_on:
            self._passed_on = asked
            self._connection.send({"stop": asked, "why": ""})

    def _doubt(self, now: float) -> None:
        """Rank 0 itself may be what does not answer."""
        waits_too_long = self._waited_s(now) > self.timeout_s + 1
        if (self.reported or waits_too_long) and now - self._heard > SILENT_S and self._server is None:
            late = f"did not come within timeout_s={self.timeout_s:g} s: it no longer answers"
            here = f"; the others wait at {self._place()}" if waits_too_long else ""
            self._rank_0_is_lost(f"rank 0 {late if waits_too_long else 'no longer answers'} (stopped, or its host is down){here}", False)

    def _rank_0_is_lost(self, words: str, patient: bool = True) -> None:
        """Without the failure server a rank prints its own error; else one rank of each host says what is missing."""
        own = self.reported if self.reported is not None and self.reported.kind == FOUND else None
        if own is not None:
            signals.say(own.shown(f" on rank {self._launch.rank}"))
        elif self._speaks_for_its_host():
            signals.say(f"error: {words}")
        self._connection.send({"failed": Failure(words, kind=PRINTED).row()})  # should rank 0 go on after all, it will find this
        self._conclude(own or Failure(words), patient)

    def _speaks_for_its_host(self) -> bool:
        """Ranks of one host agree on who speaks by a name that only one of them can take."""
        time.sleep(min(self._launch.rank - 1, 5) * 0.2)  # the lowest first; it holds the name while it lingers
        self._name_taken = socket.socket(socket.AF_UNIX)
        try:
            self._name_taken.bind(f"\0lockstep {self._name}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True

    def _finish(self, cause: Failure) -> None:
        """The main thread hears of it by itself, as a rule; where it does not, the process ends here."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < (GRACE_S if self._patient else 1.0):
            if self._main_is_leaving or (passed > STUCK_S and self._waited_s(time.monotonic()) > STUCK_S):
                break
            time.sleep(0.1)
        if not self._main_is_leaving:
            self._end_now(cause)

    def _end_now(self, cause: Failure) -> None:
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
