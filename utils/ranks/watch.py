"""Ends all ranks together, with one reason: a thread beside the main thread of every rank.

Twice a second it tells the store that all ranks share where its main thread is, and reads the key
`end`. A rank that has a reason to end the run writes it there unless another rank did; so all ranks
end for the first reason, which rank 0 prints. Then main threads end, and where one cannot, because
it waits in a collective for ranks that are gone, this thread ends the process.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from signal import SIGINT, SIGTERM

import torch.distributed as c10d

from utils.files import ROOT
from utils.ranks import signals
from utils.ranks.launchers import Launch

BEAT_S = 0.5
SILENT_S = 2.5  # a rank whose beat stays the same for so long does not answer
# The same on another host, where no process can be looked at: one call into C that keeps the
# interpreter to itself, such as reading a huge JSON file, stops the beat too.
FAR_SILENT_S = 30.0
# how long the main thread may take to end by itself once the run is over; less if it waits or hangs
GRACE_S, STUCK_S = 5.0, 2.0
# how long a rank stays when the run has failed: launchers kill the others when one has gone
LINGER_S = 1.5
LEAVE_S = 3.0  # how long rank 0, the host of the store, waits for ranks to read the reason

# Why a rank ends: a signal, which it prints itself; others do not come; its own error; its process
# is gone; an error that may follow from another rank's end. The number is for how many seconds such
# a reason waits for a better one.
PRINTED, HUNG, FOUND, ENDED, ECHO = "printed", "hung", "found", "ended", "echo"
PATIENCE_S = {PRINTED: 0.0, HUNG: 0.0, FOUND: 0.0, ENDED: 0.5, ECHO: 5.0}
ANSWER_S = PATIENCE_S[ECHO] + 5.0  # by then there is a reason, or the store does not answer
LEFT = "left"  # in place of a reason: rank 0 has finished
# where waiting happens, but never why
HIDDEN = ("utils/ranks/watch.py", "utils/ranks/distributed.py")


@dataclass(frozen=True)
class Failure:
    """Why the run ends: one line, and a traceback if the error was unexpected."""

    text: str
    status: int = 1
    kind: str = FOUND
    trace: str = ""
    rank: int = 0

    def message(self, where: str = "") -> str:
        """Returns the error as the user reads it."""
        return f"error{where}: {self.text}" + (f"\n{self.trace}" if self.trace else "")


@dataclass(frozen=True)
class Beat:
    """The last report of a rank."""

    at: float = 0.0  # by its clock
    entered: int = 0  # waits for others, so far
    waits: bool = False
    location: str = ""
    has_left: bool = False
    answers: bool = True


class Watch:
    """The main thread's handle of the watch, which begins at once."""

    def __init__(
        self, store: c10d.Store, launch: Launch, timeout_s: float, processes: Sequence[str]
    ) -> None:
        """`store` is a connection of the watch's own; `processes` is what each rank's
        `this_process()` returned.
        """
        # called with the cause before a hard exit
        self.last_words: Callable[[str], object] = lambda cause: None
        self.reported: Failure | None = None  # by this rank
        self.cause: Failure | None = None  # of the run's end; the user has read it
        self._store, self._launch, self._timeout_s = store, launch, timeout_s
        self._size, self._main = len(processes), threading.main_thread().ident or 0
        # this process's time, by `_now`
        self._looked, self._stood_still_s, self._clock = time.monotonic(), 0.0, threading.Lock()
        # the main thread's waits: how deeply they are nested, their number, the present one's start
        self._depth, self._entered, self._since = 0, 0, 0.0
        self._near = _open_processes(processes, launch.rank)
        self._gone: set[int] = set()  # ranks on this host that have ended
        # each rank watches the next one, if that is on another host
        following = (launch.rank + 1) % self._size
        self._far = None if following in (launch.rank, *self._near) else following
        self._far_beat, self._far_since = "", self._now()
        self._heard = self._now()  # when the store last answered
        self._reasons: list[tuple[float, Failure]] = []
        self._before: list[Beat] | None = None  # the beats when this rank began to doubt others
        self._leaving = False
        self._over = threading.Event()  # set once the cause is known
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        if launch.rank > 0:
            threading.Thread(target=self._doubt_rank_0, name="watch's watch", daemon=True).start()

    def stop(self) -> None:
        """Leaves, so that no other rank takes this one for lost; a second call does nothing."""
        if not self._leaving:
            self._leaving = True
            self._thread.join(LEAVE_S + 2 * BEAT_S)

    @contextmanager
    def waiting(self, forever: bool = False) -> Iterator[None]:
        """A context for everything in which the main thread waits for other ranks. If it may take
        `forever`, that holds for waits within it, too.
        """
        if self._depth == 0:
            self._entered, self._since = self._entered + 1, math.inf if forever else self._now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def report(self, failure: Failure) -> Failure | None:
        """Report that this rank cannot go on; only the first report counts.

        Waits until all ranks know why the run is over, and returns that; None if the store does not
        answer.
        """
        if self.reported is None:
            self.reported = self._add(failure)
        if self._over.wait(ANSWER_S):
            if self._launch.rank == 0:
                self._wait_for_others()
            else:
                time.sleep(LINGER_S)
        return self.cause

    def _run(self) -> None:
        """Without this thread a rank would wait forever for others that are gone."""
        rank, store = self._launch.rank, self._store
        try:
            while self.cause is None:
                if self._leaving:
                    store.set(f"left/{rank}", "")
                    if rank == 0:
                        # the store ends with this process, which is not a failure of the others
                        store.compare_set("end", "", LEFT)
                        self._wait_for_others()
                    return
                self._beat()
                # a launcher that is gone counts as a SIGTERM from it, which all ranks follow
                if self._launch.orphaned and not signals.stop_signal():
                    if self._launch.local_rank == 0:
                        started = f"{self._launch.launcher}, which started rank {rank}"
                        signals.say(f"{started}, is gone: saving, then stopping")
                    signals.request_stop(SIGTERM)
                now, reasons = self._now(), self._reasons
                due = [why for since, why in reasons if now - since >= PATIENCE_S[why.kind]]
                # The one place where ranks agree on why the run ends: the store sets the key only
                # while it is empty, and returns what it holds then.
                end = store.compare_set("end", "", best_of(due, store, self._before)).decode()
                self._heard = self._now()
                if end == LEFT:
                    store.set(f"left/{rank}", "")
                    return
                if end:
                    cause = Failure(**json.loads(end))
                    if rank == 0 and cause.kind != PRINTED:
                        signals.say(cause.message(where(cause, self.reported)))
                    with suppress(c10d.DistError):  # rank 0 may be gone already
                        store.set(f"left/{rank}", "")
                    self._end(cause)
                elif ended := self._look_for_the_dead(BEAT_S):
                    time.sleep(0.2)  # ranks that are killed together are named together
                    ended |= self._look_for_the_dead()
                    if 0 in ended:
                        raise c10d.DistError("rank 0 hosted the store")
                    if killed := [who for who in sorted(ended) if not has_left(store, who)]:
                        self._add(Failure(lost(killed), kind=ENDED))
        except c10d.DistError:
            if not (self._leaving or self.cause):
                self._conclude_alone("rank 0 is gone (killed, or its host is down)")

    def _beat(self) -> None:
        """Tells where this rank is, and looks whether others still answer."""
        waited_s, store = self._waited_s(), self._store
        beat = [time.monotonic(), self._entered, waited_s >= 0, location_of(self._main)]
        store.set(f"beat/{self._launch.rank}", json.dumps(beat))
        echoes = self.reported is not None and self.reported.kind == ECHO
        # Which ranks answer can only be seen over time. So shortly before the time is up, and when
        # an error may follow from another rank's end, this rank remembers all beats, to compare
        # with later ones.
        before = self._before
        if waited_s < self._timeout_s - SILENT_S and not echoes:
            self._before = None
        elif before is None:
            self._before = beats_of(store, self._size)
        elif waited_s > self._timeout_s:
            self._add(Failure(hang(since(before, store), self._timeout_s), kind=HUNG))
        if self._far is not None:
            far_beat, now = read(store, f"beat/{self._far}"), self._now()
            if far_beat != self._far_beat:
                self._far_beat, self._far_since = far_beat, now
            elif now - self._far_since > FAR_SILENT_S and not has_left(store, self._far):
                silent = f"rank {self._far} has not answered for {FAR_SILENT_S:g} s"
                self._add(Failure(f"{silent} (killed, stopped, or its host is down)", kind=ENDED))

    def _look_for_the_dead(self, within_s: float = 0.0) -> set[int]:
        """Waits until a process on this host ends. Returns the ranks that have ended since the last
        call.
        """
        poll = select.poll()
        for descriptor in self._near.values():
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * within_s)}
        ended = {rank for rank, descriptor in self._near.items() if descriptor in ready}
        for rank in ended:
            os.close(self._near.pop(rank))
        self._gone |= ended
        return ended

    def _add(self, reason: Failure) -> Failure:
        """Adds a reason of this rank's to end the run."""
        own = replace(reason, rank=self._launch.rank)
        self._reasons.append((self._now(), own))
        return own

    def _doubt_rank_0(self) -> None:
        """The store's calls have no time limit, so the thread that makes them cannot notice that
        rank 0 no longer answers.
        """
        far_s = math.inf if 0 in self._near else FAR_SILENT_S
        while self.cause is None and self._thread.is_alive():
            time.sleep(BEAT_S)
            silent_s = self._now() - self._heard
            if silent_s < SILENT_S:
                continue
            if self._waited_s() > self._timeout_s + 1:
                self._conclude_alone(
                    f"rank 0 did not come within timeout_s={self._timeout_s:g} s: it no longer"
                    " answers (stopped, or its host is down); the others wait at"
                    f" {location_of(self._main)}"
                )
            elif silent_s > (2 * SILENT_S if self.reported else far_s):
                self._conclude_alone("rank 0 no longer answers (stopped, or its host is down)")

    def _conclude_alone(self, words: str) -> None:
        """Without the store a rank prints its own error; if it has none, the first rank of each
        host says what it knows.
        """
        cause, here = Failure(words), self._launch.rank
        self._look_for_the_dead()
        if self.reported is not None and self.reported.kind == FOUND:
            cause = self.reported
            signals.say(cause.message(f" on rank {here}"))
        elif all(rank == 0 or rank > here for rank in self._near):
            signals.say(f"error: {words}")
        self._end(cause)

    def _end(self, cause: Failure) -> None:
        """The main thread usually ends by itself; if it does not, the process ends here."""
        self.cause, began = cause, time.monotonic()
        self._over.set()
        grace_s = STUCK_S if cause.kind == HUNG else GRACE_S
        if cause.status == signals.STATUS[SIGINT] and cause.rank != self._launch.rank:
            grace_s = 0.0  # a second Ctrl-C somewhere: nothing more is saved
        while time.monotonic() - began < grace_s and not self._leaving:
            if time.monotonic() - began > STUCK_S and self._waited_s() > STUCK_S:
                break  # in a collective for ranks that are gone: no error will ever wake it
            time.sleep(0.1)
        if self._leaving:
            return
        if self._launch.rank == 0:
            self._wait_for_others()
        signals.end_now(cause.status, lambda: self.last_words(cause.text))

    def _wait_for_others(self) -> None:
        """Rank 0 hosts the store, and stays until the others have read why the run ends."""
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end:
            self._look_for_the_dead()
            others = [f"left/{rank}" for rank in range(1, self._size) if rank not in self._gone]
            if not others or self._store.check(others):
                return
            time.sleep(0.05)

    def _waited_s(self) -> float:
        """Seconds of the present wait for others; less than 0 if there is none, or no limit."""
        return self._now() - self._since if self._depth else -math.inf

    def _now(self) -> float:
        """Seconds on a clock that stops while this process is suspended, as between Ctrl-Z and fg.
        The threads read it more often than every SILENT_S.
        """
        with self._clock:
            now = time.monotonic()
            if now - self._looked > SILENT_S:
                self._stood_still_s += now - self._looked
                self._before = None
            self._looked = now
            return now - self._stood_still_s


def has_left(store: c10d.Store, rank: int) -> bool:
    return store.check([f"left/{rank}"])


def read(store: c10d.Store, key: str) -> str:
    """A key's value, empty if there is none; a `get` would wait for it."""
    return store.compare_set(key, "", "").decode()


def beats_of(store: c10d.Store, size: int) -> list[Beat]:
    """The last beat of each rank, in two requests: all ranks ask at once."""
    keys = [f"beat/{rank}" for rank in range(size)]
    # `multi_get` would wait for a rank that has not come so far
    texts = store.multi_get(keys) if store.check(keys) else [read(store, key) for key in keys]
    return [Beat(*json.loads(text or "[]")) for text in texts]


def since(before: Sequence[Beat], store: c10d.Store) -> list[Beat]:
    """The beats of all ranks; those that have not changed do not answer."""
    beats = []
    for rank, (old, now) in enumerate(zip(before, beats_of(store, len(before)), strict=True)):
        answers = now.at > old.at
        beats.append(replace(now, answers=answers, has_left=not answers and has_left(store, rank)))
    return beats


def best_of(due: Sequence[Failure], store: c10d.Store, before: Sequence[Beat] | None) -> str:
    """Returns why a rank would end the run, or an empty text; `before` are the beats when it began
    to doubt others.
    """
    if not due:
        return ""
    best = min(due, key=lambda reason: list(PATIENCE_S).index(reason.kind))
    # a rank that failed would have reported it by now: a silent one has been killed
    if best.kind == ECHO and before is not None:
        beats = enumerate(since(before, store))
        silent = [rank for rank, beat in beats if not (beat.answers or beat.has_left)]
        best = Failure(lost(silent), kind=ENDED) if silent else best
    return json.dumps(asdict(best))


def where(cause: Failure, reported: Failure | None) -> str:
    """Names the rank that failed, unless the text does, or the error is not one rank's: a user's
    mistake, or one that all ranks have found; `reported` is what rank 0 has.
    """
    if cause.kind not in (FOUND, ECHO) or (cause.rank == 0 and not cause.trace):
        return ""
    found_by_all = cause.rank > 0 and reported is not None and reported.text == cause.text
    return "" if found_by_all else f" on rank {cause.rank}"


def this_process() -> str:
    """This process's id, and within which kernel and container that is unique."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{os.getpid()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getpid()} unknown {os.getpid()}"


def _open_processes(processes: Sequence[str], here: int) -> dict[int, int]:
    """Opens a descriptor, which is ready when the process has ended, for each other rank on this
    host. A rank that cannot be looked at is treated as one on another host.
    """
    this_host, opened = processes[here].partition(" ")[2], {}
    for rank, process in enumerate(processes):
        pid, _, host = process.partition(" ")
        if rank != here and host == this_host:
            with suppress(OSError, AttributeError):  # not on Linux, or forbidden
                opened[rank] = os.pidfd_open(int(pid))
    return opened


def hang(beats: Sequence[Beat], timeout_s: float) -> str:
    """Which ranks do not come, and where all ranks are."""
    waiting = [rank for rank, beat in enumerate(beats) if beat.answers and beat.waits]
    furthest = max((beats[rank].entered for rank in waiting), default=0)
    absent = [rank for rank in range(len(beats)) if rank not in waiting]
    # A rank that has entered as many waits as the others is past the wait they are in: another rank
    # holds them up.
    missing = [
        rank for rank in absent if not beats[rank].answers or beats[rank].entered < furthest
    ] or absent
    if not missing:
        places = "; ".join(f"rank {rank} at {beats[rank].location}" for rank in waiting)
        return f"the ranks wait for each other for longer than timeout_s={timeout_s:g} s: {places}"
    first = beats[missing[0]]
    if first.has_left:
        doing = "has ended already"
    elif first.answers:
        doing = f"is at {first.location}"
    else:
        doing = f"no longer answers (stopped, or its host is down); it was last at {first.location}"
    who = "it" if len(missing) == 1 else f"rank {missing[0]}"
    others = f"; the others wait at {beats[waiting[0]].location}" if waiting else ""
    return f"{named(missing)} did not come within timeout_s={timeout_s:g} s: {who} {doing}{others}"


def lost(ranks: Sequence[int]) -> str:
    """The line about ranks that are gone."""
    are = "is" if len(ranks) == 1 else "are"
    return f"{named(ranks)} {are} gone (killed, or its host is down)"


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def location_of(thread: int) -> str:
    """Returns the lines at which a thread is: its innermost line in this repository, and the line
    of pretrain.py that led there.
    """
    inner = outer = nowhere = ""
    frame = sys._current_frames().get(thread)
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
        # which lets go of what the frame refers to, tensors too
        frame = frame.f_back
    return f"{inner} ({outer})" if outer and outer != inner else inner or nowhere
