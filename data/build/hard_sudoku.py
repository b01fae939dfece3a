"""Sudoku boards that need search, made by several processes: the same boards however many there are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import numpy as np

from data.build.common import end_with_parent
from data.sudoku_hard import BOARDS, Hard, hard_boards, relabelled
from utils.errors import ConfigError

Call = tuple[int, int, int, int, int]  # what hard_boards is given, but whom to tell

SIZE = 9  # smaller boards hardly need search, larger ones take too long


def hard_parts(counts: tuple[int, ...], min_guesses: int, seed: int, workers: int | None) -> list[Hard]:
    """For each count that many puzzles; no two of their solved boards are alike up to the names of digits."""
    if min(counts) < 1:
        raise ConfigError(f"train={counts[0]} test={counts[-1]}: each part needs at least one board")
    if min_guesses < 1:
        raise ConfigError(f"--min-guesses {min_guesses}: a hard board takes at least one; try 20")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: must be at least 1; leave it out for one a core")
    wanted = [min(BOARDS, count - first) for count in counts for first in range(0, count, BOARDS)]
    calls = list(zip(repeat(SIZE), wanted, repeat(min_guesses), repeat(seed), range(len(wanted)), strict=False))
    made = _made(calls, min(len(calls), workers or len(os.sched_getaffinity(0))), Bar(sum(counts)))
    found = sum(len(part.puzzles) for part in made)
    whole = Hard(*(np.concatenate(parts) for parts in zip(*made, strict=True)))
    different = len(np.unique(relabelled(whole.answers, SIZE), axis=0))
    if found < sum(counts):
        raise ConfigError(f"--min-guesses {min_guesses}: only {found} of {sum(counts)} boards found; ask for fewer guesses")
    if different < found:
        raise ConfigError(f"--seed {seed}: {found - different} of the {found} boards came twice; try another seed")
    return [Hard(*parts) for parts in zip(*(np.split(field, np.cumsum(counts)[:-1]) for field in whole), strict=True)]


class Bar:
    """How many boards there are, in place on a terminal; elsewhere nothing."""

    def __init__(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()

    def show(self, made: int) -> None:
        if sys.stderr.isatty():
            speed = made / max(time.monotonic() - self.began, 1e-9)
            text = f"\r{100 * made / self.total:5.1f} %  {made:,} of {self.total:,} boards  {speed:,.1f} boards/s "
            print(text, end="" if made < self.total else "\n", file=sys.stderr, flush=True)


def _made(calls: list[Call], workers: int, bar: Bar) -> list[Hard]:
    """The jobs' boards, in the order of the jobs."""
    context = get_context("spawn")
    made = context.Value("q", 0)
    if workers == 1:
        _TELL[:] = [partial(_count, made, bar.show)]
        return [_work(call) for call in calls]
    try:
        with ProcessPoolExecutor(workers, context, _begin_worker, (made,)) as pool:
            waiting = [pool.submit(_work, call) for call in calls]
            while wait(waiting, timeout=0.5).not_done:
                bar.show(made.value)
            bar.show(made.value)
            return [job.result() for job in waiting]
    except BrokenProcessPool:
        raise ConfigError("a process was killed, as the system does when memory runs out; start again, with fewer --workers") from None


_TELL: list[Callable[[int], None]] = []


def _begin_worker(made: Any) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    _TELL[:] = [partial(_count, made, lambda number: None)]


def _count(made: Any, show: Callable[[int], None], more: int) -> None:
    with made.get_lock():
        made.value += more
    show(made.value)


def _work(call: Call) -> Hard:
    return hard_boards(*call, _TELL[0])
