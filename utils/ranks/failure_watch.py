"""A thread beside the main thread of every rank, so that all ranks fail together.

Twice a second it reports to the failure server on rank 0 (see failure_server.py) whether this rank
waits for others and where it is, and it ends the process once the run is over. A main thread that
is blocked in a collective cannot do that itself.
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
from utils.ranks.failure import ECHO, ENDED, FOUND, LINGER_S, PRINTED, Failure
from utils.ranks.failure_server import PATIENCE_S, SILENT_S, FailureServer, Standstill
from utils.ranks.launchers import Launch

BEAT_S = 0.5
ANSWER_S = PATIENCE_S[ECHO] + 5.0  # the failure server has decided by then, or cannot be reached
# how long the main thread may take to end by itself once it is known that the run is over
GRACE_S = 5.0
STUCK_S = 2.0  # the same where it waits for others, which no longer come
# where waiting happens, but never why
HIDDEN = ("utils/ranks/failure_watch.py", "utils/ranks/distributed.py")


class Watch:
    """The main thread's handle of the failure watch; on rank 0 it has the `server`."""

    def __init__(
        self,
        connection: Connection,
        launch: Launch,
        timeout_s: float,
        where: str,
        server: FailureServer | None = None,
    ) -> None:
        """`connection` leads to the failure server, which knows this rank by it. `where` names the
        run among those of this host.
        """
        self.timeout_s = timeout_s
        # called with the cause before a hard exit
        self.last_words: list[Callable[[str], None]] = []
        self.reported: Failure | None = None  # by this rank
        self.cause: Failure | None = None  # of the run's end; the user has read it
        self._connection, self._launch, self._where = connection, launch, where
        self._server = server
        self._process, self._main = os.getpid(), threading.main_thread().ident
        self._depth, self._entered, self._since = 0, 0, 0.0
        self._heard = time.monotonic()
        self._orphaned: float | None = None
        self._server_left = self._main_is_leaving = False
        self._concluded, self._patient = 0.0, True
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave in good order, so that nobody misses this rank; a second call does nothing."""
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
        """Report that this rank cannot go on; only the first report counts."""
        if self.reported is None:
            self.reported = failure
            self._connection.send({"failed": failure.row()})

    def wait_for_cause(self) -> Failure | None:
        """Wait until all ranks know why the run is over, and return it; None if the failure server
        does not answer.
        """
        if self._known.wait(ANSWER_S):
            wait_s = max(0.0, self._concluded + LINGER_S - time.monotonic())
            time.sleep(wait_s) if self._server is None else self._server.wait(wait_s)
        return self.cause

    def _run(self) -> None:
        """Without this thread a rank would wait for ever for others that are gone: if it fails, the
        rank ends.
        """
        try:
            self._listen()
        except Exception as error:
            signals.say(
                f"error on rank {self._launch.rank}: its watch over the others has failed"
                f" ({type(error).__name__}: {error})"
            )
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
                self._connection.send(
                    {"beat": [self._entered, self._waited_s(now), self._location()]}
                )
                self._look_for_launcher(now)
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
        """Do what the failure server says; False when nothing more will come."""
        messages = self._connection.receive()
        self._heard = time.monotonic()
        for message in messages or ():
            self._obey(message)
        if (
            messages is None
            and self.cause is None
            and not (self._server_left or self._main_is_leaving)
        ):
            self._rank_0_is_lost("rank 0 is gone (killed, or its host is down)")
        return messages is not None and not self._server_left

    def _obey(self, message: Message) -> None:
        if "end" in message:
            self._conclude(Failure(message["end"], message["status"]), patient=message["patient"])
        elif "refused" in message:
            line = f"{message['refused']}; give each process a number of its own"
            signals.say(f"error on rank {self._launch.rank}: {line}")
            self._conclude(Failure(line, 2), patient=False)
        elif "left" in message:
            self._server_left = True
            self._connection.finish()

    def _conclude(self, cause: Failure, patient: bool = True) -> None:
        self._concluded, self._patient, self.cause = time.monotonic(), patient, cause
        self._known.set()

    def _look_for_launcher(self, now: float) -> None:
        """A launcher that is gone counts as a SIGTERM from it, which all ranks follow."""
        if self._orphaned is None and self._launch.orphaned:
            self._orphaned = now
            if self._launch.local_rank == 0:
                started = f"{self._launch.launcher}, which started rank {self._launch.rank}"
                signals.say(f"{started}, is gone: saving, then stopping")
            signals.request_stop(SIGTERM)
        if self._orphaned is not None and now - self._orphaned > self.timeout_s:
            words = "the run did not stop, though its launcher had gone"
            self.report(Failure(words, signals.STATUS[SIGTERM], ENDED))

    def _doubt(self, now: float) -> None:
        """Notice that rank 0 itself no longer answers."""
        waits_too_long = self._waited_s(now) > self.timeout_s + 1
        if (
            (self.reported or waits_too_long)
            and now - self._heard > SILENT_S
            and self._server is None
        ):
            late = f"did not come within timeout_s={self.timeout_s:g} s: it no longer answers"
            here = f"; the others wait at {self._location()}" if waits_too_long else ""
            self._rank_0_is_lost(
                f"rank 0 {late if waits_too_long else 'no longer answers'} (stopped, or its host is"
                f" down){here}",
                False,
            )

    def _rank_0_is_lost(self, words: str, patient: bool = True) -> None:
        """Without the failure server a rank prints its own error; if it has none, one rank of each
        host says that rank 0 is lost.
        """
        own = self.reported if self.reported is not None and self.reported.kind == FOUND else None
        if own is not None:
            signals.say(own.message(f" on rank {self._launch.rank}"))
        elif self._speaks_for_its_host():
            signals.say(f"error: {words}")
        # should rank 0 go on after all, it will find this
        self._connection.send({"failed": Failure(words, kind=PRINTED).row()})
        self._conclude(own or Failure(words), patient)

    def _speaks_for_its_host(self) -> bool:
        """Returns whether this rank speaks for its host: the first to take a name does."""
        # the lowest first; it holds the name while it lingers
        time.sleep(min(self._launch.rank - 1, 5) * 0.2)
        self._name_taken = socket.socket(socket.AF_UNIX)
        try:
            self._name_taken.bind(f"\0lockstep {self._where} speaker")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True

    def _finish(self, cause: Failure) -> None:
        """The main thread usually ends by itself; if it does not, the process ends here."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < (GRACE_S if self._patient else 1.0):
            if self._main_is_leaving or (
                passed > STUCK_S and self._waited_s(time.monotonic()) > STUCK_S
            ):
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

    def _location(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        try:
            return location_of(frame)
        finally:
            del frame  # what a frame refers to, tensors too, lives as long as somebody holds it


def location_of(frame: FrameType | None) -> str:
    """Returns the lines at which a thread is: its innermost line in this repository, and the line
    of pretrain.py that led there.
    """
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
