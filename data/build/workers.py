"""Work for several processes, whose results come in the order of the tasks: the same bytes whatever
their number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import Any, TypeVar

from utils.errors import ConfigError

T = TypeVar("T")
PAUSE = 10.0  # seconds between two lines where there is no terminal
LISTEN = 1.0  # seconds between two looks at what the processes have told
_said_at = time.monotonic()  # what is done within a pause says nothing
_tell: Callable[[int], None] | None = None  # where a task's news go


def in_order(
    work: Callable[..., T],
    tasks: Iterable[tuple[Any, ...]],
    workers: int | None = None,
    heard: Callable[[int], None] = lambda _: None,
) -> Generator[T, None, None]:
    """`work(*task)` of each task; tasks are drawn as they are needed, and the first results do not
    wait for the last. While they are waited for, `heard` is called now and then with the sum of
    what the tasks have told (`tell`).

    Who has enough closes the iterator: what was begun is finished, and nothing more is.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: must be at least 1; leave it out for one a core")
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        with _told_to(heard):
            yield from (work(*task) for task in tasks)
        return
    context = get_context("spawn")
    told = context.Value("q", 0)

    def result(future: Future[T]) -> T:
        while not wait([future], timeout=LISTEN).done:
            heard(told.value)
        return future.result()

    waiting: deque[Future[T]] = deque()
    try:
        with _exit_on_sigterm(), ProcessPoolExecutor(workers, context, _begin, (told,)) as pool:
            try:
                for task in tasks:
                    waiting.append(pool.submit(work, *task))
                    if len(waiting) > 2 * workers:  # no further ahead: what waits takes memory
                        yield result(waiting.popleft())
                while waiting:
                    yield result(waiting.popleft())
            except (KeyboardInterrupt, SystemExit):
                for process in active_children():  # or the pool waits for what they have begun
                    process.terminate()
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except BrokenProcessPool:
        raise ConfigError(
            "a process was killed, as the system does when memory runs out; start again, with fewer"
            " --workers"
        ) from None


@contextmanager
def _exit_on_sigterm() -> Generator[None, None, None]:
    """SIGTERM raises SystemExit: killed at once, Python leaves the pool's semaphores behind, and
    warns of them.
    """
    at_once = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not at_once or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def tell(more: int) -> None:
    """Called by a task: so much more is done."""
    if _tell is not None:
        _tell(more)


@contextmanager
def _told_to(heard: Callable[[int], None]) -> Generator[None, None, None]:
    """Tasks of this process tell `heard` directly."""
    global _tell
    before, total = _tell, 0

    def add(more: int) -> None:
        nonlocal total
        total += more
        heard(total)

    _tell = add
    try:
        yield
    finally:
        _tell = before


def _begin(told: Any) -> None:
    global _tell

    def add(more: int) -> None:
        with told.get_lock():
            told.value += more

    _tell = add
    # Ctrl-C reaches the whole terminal, and one answer is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent does, even if it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def show(text: str) -> None:
    """How far it is: on the terminal's last line, or in a file now and then as a line."""
    global _said_at
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)
    elif time.monotonic() - _said_at >= PAUSE:
        _said_at = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def shown() -> None:
    """Starts a new line for the next message."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
