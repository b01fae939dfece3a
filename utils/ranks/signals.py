"""Requests to stop: SIGTERM, SIGUSR1, Ctrl-C and a closed terminal set a flag that the run reads
between steps.

Python runs a handler between two bytecodes of the main thread, which may be blocked for minutes in
a collective. So the handlers here do nothing: the interpreter writes the number of each signal into
a pipe, and a thread reads it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

STATUS: dict[int, int] = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: 130}
# other signals, and what they count as: a closed terminal asks to stop
ALIKE: dict[int, int] = {signal.SIGHUP: signal.SIGTERM}
# if ranks get different signals, all follow the first in this order
ORDER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_PRESS_S = 1.0  # under torchrun one Ctrl-C comes twice: from the terminal and from torchrun
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies
WORDS_S = 2.0  # how long a terminal that takes no output may delay a hard exit
# a number for each signal in ORDER, 1 for the one that this process received, to be summed over
# ranks
flags = [0.0] * len(ORDER)


@dataclass
class _State:
    installed: bool = False
    deferred: bool = False
    interrupted: float | None = None  # the time of the first Ctrl-C
    rank: int = 0
    closing: Callable[[int, str], bool] = lambda signum, line: True


_state = _State()
_lock = threading.RLock()


def install(rank: int = 0, closing: Callable[[int, str], bool] | None = None) -> None:
    """Starts to listen; called from the main thread. `closing(signum, line)` runs before a signal
    ends the process, and returns whether to print the line.
    """
    _state.rank, _state.closing = rank, closing or (lambda signum, line: rank == 0)
    if _state.installed:
        return
    _state.installed = True
    # a signal that arrives before everything is in place could be lost
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (*STATUS, *ALIKE))
    read, write = os.pipe()
    os.set_blocking(write, False)  # the interpreter's handler must never wait for the pipe's reader
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in (*STATUS, *ALIKE):
        if signum in ALIKE and signal.getsignal(signum) is signal.SIG_IGN:
            continue  # started by nohup
        signal.signal(signum, _nothing)
        signal.siginterrupt(signum, False)  # libraries in C need not be ready for interrupted calls
    os.register_at_fork(after_in_child=_detach)  # data loaders fork
    threading.Thread(target=_listen, args=(read,), name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def defer() -> None:
    """From now on, a signal asks the run to stop; before, it ends the process at once."""
    _state.deferred = True


def stop_signal() -> int:
    """Returns the signal that asked this process to stop, or 0."""
    return agreed_signal(flags)


def request_stop(signum: int) -> None:
    """Asks this process to stop, as the signal would."""
    with _lock:
        if _state.installed and not _state.deferred:
            _end(signum, f"stopped by {signal.Signals(signum).name} before training began")
        if stop_signal():
            return  # the first one counts
        flags[ORDER.index(signal.Signals(signum))] = 1.0
    if signum == signal.SIGINT and _state.rank == 0:
        say("Ctrl-C: saving, then stopping; again to stop at once")


def agreed_signal(sums: Sequence[float]) -> int:
    """Returns the signal that all ranks follow, given the sums of their flags, or 0."""
    return next((int(signum) for signum, total in zip(ORDER, sums, strict=True) if total > 0.5), 0)


def quiet_worker() -> None:
    """Called in a worker process, which leaves signals to the main process and dies with it.

    A forked worker shares the sockets of its rank and the lock of the run directory. While it
    lives, the store of a killed rank seems to listen, and the directory to be in use.
    """
    for signum in (*STATUS, *ALIKE):
        signal.signal(signum, signal.SIG_IGN)
    _detach()
    if sys.platform == "linux":  # elsewhere workers are spawned, and inherit neither
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def say(line: str) -> None:
    """Prints a line to stderr."""
    with suppress(OSError, ValueError):  # a closed terminal is no reason to fail
        print(line, file=sys.stderr, flush=True)


def end_now(status: int, words: Callable[[], object] = lambda: None) -> NoReturn:
    """Ends the process from any thread, whatever the main thread does; `words` has two seconds.

    Prints in a separate thread, because a terminal or a disk may block forever.
    """

    def speak() -> None:
        with suppress(Exception):  # whatever fails here, the process ends
            words()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(WORDS_S)
    os._exit(status)


def _listen(pipe: int) -> None:
    while True:
        for number in os.read(pipe, 64):
            if (signum := ALIKE.get(number, number)) in STATUS:
                _heard(signum)


def _heard(signum: int) -> None:
    if _state.deferred and signum == signal.SIGINT:
        now = time.monotonic()
        if _state.interrupted is None:
            _state.interrupted = now
        elif now - _state.interrupted > SAME_PRESS_S:
            _end(signum, "stopped at once by Ctrl-C")
    request_stop(signum)


def _end(signum: int, line: str) -> None:
    spoken = _state.closing(signum, line)
    end_now(STATUS[signum], lambda: say(line) if spoken else None)


def _nothing(signum: int, frame: object) -> None:
    """The number is in the pipe already."""


def _detach() -> None:
    """A forked child must not write into its parent's pipe."""
    signal.set_wakeup_fd(-1)
