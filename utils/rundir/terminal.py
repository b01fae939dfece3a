"""Prints the lines of a run, and its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

PAUSE_S = 10.0  # between lines of progress


def show(line: str) -> None:
    # the reader may have gone (`| head`), the disk be full, or the stream closed
    with suppress(OSError, ValueError):
        print(line, flush=True)


class Progress:
    """Shows how many steps or examples are done, every ten seconds for each thing that is counted:
    the steps of a long prediction and the examples of its evaluation, say.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        # by what is counted: when progress was first told and with which number, and the last line
        self._first: dict[str, tuple[float, int]] = {}
        self._printed: dict[str, float] = {}

    def __call__(
        self,
        what: str,
        done: int,
        total: int,
        loss: float | None = None,
        headline_name: str = "",
        headline_value: float | None = None,
        examples_per_s: float | None = None,
    ) -> None:
        """None is a value that is not known yet. What begins again at 0, as each evaluation does,
        is timed anew.
        """
        now = time.monotonic()
        if not done:
            self._first[what], self._printed[what] = (now, 0), now
            return
        began, first = self._first.setdefault(what, (now, done))
        if done < total and now - self._printed.get(what, -math.inf) < PAUSE_S:
            return
        self._printed[what] = now
        texts = [f"{100 * done / max(1, total):3.0f}%", f"{what} {done}/{total}"]
        if loss is not None:
            texts.append(f"loss {loss:.3g}")
        if headline_value is not None:
            number = ".1%" if "accuracy" in headline_name else ".4g"
            texts.append(f"{headline_name.replace('_', ' ')} {headline_value:{number}}")
        if examples_per_s is not None:
            texts.append(f"{examples_per_s:,.0f} examples/s")
        if first < done < total:
            seconds = (now - began) / (done - first) * (total - done)
            texts.append(f"{timedelta(seconds=round(seconds))} left")
        self._show("  ".join(texts))
