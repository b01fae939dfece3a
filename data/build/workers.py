"""Runs tasks in several processes. Results come in the order of the tasks, so their number does not
change what is built.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from typing import Any, TypeVar

from tqdm import tqdm

from utils.errors import ConfigError

T = TypeVar("T")


def in_order(
    work: Callable[..., T], tasks: Iterable[tuple[Any, ...]], workers: int | None = None
) -> Generator[T, None, None]:
    """Yields `work(*task)` of each task, by `workers` processes, one for each core by default.

    Tasks are drawn as they are needed. Close the iterator to stop early; running tasks finish.
    """
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        yield from (work(*task) for task in tasks)
        return
    waiting: deque[Future[T]] = deque()
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as pool:
            try:
                for task in tasks:
                    waiting.append(pool.submit(work, *task))
                    if len(waiting) > 2 * workers:  # no further ahead: what waits takes memory
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except (KeyboardInterrupt, SystemExit):
                for process in active_children():  # or the pool waits for running tasks
                    process.terminate()
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except BrokenProcessPool:
        raise ConfigError(
            "a process was killed, as the system does when memory runs out; start again, with fewer"
            " --workers"
        ) from None


def _begin() -> None:
    # Ctrl-C reaches the whole terminal, and the main process answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exits when the parent does, even if it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def progress(total: int | None, unit: str, scale: bool = False) -> tqdm:
    """A progress bar for what takes more than a second. In a file it moves every ten seconds."""
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit=unit, unit_scale=scale, delay=1, mininterval=pause)
