"""The progress bar: redrawn in place on a terminal, and a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from utils.terminal import CLEAR, redrawable

REDRAW_S = 0.1
PLAIN_S = 10.0
BAR = 20
# dropped in this order on a narrow terminal
SPARE = ("speed", "headline", "loss", "left", "steps")


class ProgressBar:
    """Writes the bar, and through `say` every other line, so that they never mix."""

    def __init__(
        self,
        stream: TextIO | None = None,
        launcher: str = "none",
        clock: Callable[[], float] = time.monotonic,
        shown: bool = True,
    ) -> None:
        # sys.stdout is None if it was closed before we began
        self._stream = sys.stdout if stream is None else stream
        # mpirun gives its ranks a pseudo-terminal even when its own output goes to a file.
        self._animated = redrawable(self._stream) and launcher not in (
            "openmpi",
            "mvapich2",
            "mpich",
        )
        self._clock = clock
        self._drawn = clock()  # so that the first plain line comes after PLAIN_S
        self._start: tuple[float, int] | None = None
        self._line = ""
        self._closed = not shown

    def update(
        self,
        step: int,
        total: int,
        loss: float | None,
        headline: tuple[str, float | None],
        examples_per_s: float | None,
    ) -> None:
        """Shows where the run is; most calls only look at the clock."""
        now = self._clock()
        self._start = self._start or (now, step)
        last = step >= total
        if now - self._drawn < (REDRAW_S if self._animated else PLAIN_S) and not last:
            return
        self._drawn = now
        columns = max(1, shutil.get_terminal_size().columns - 1) if self._animated else 0
        line = render(
            step, total, loss, headline, examples_per_s, self._time_left(now, step, total), columns
        )
        if not self._animated:
            self._write(line + "\n")
            return
        self._line = line
        self._write(CLEAR + self._line)

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        self._write(f"{CLEAR}{text}\n{self._line}" if self._line else f"{text}\n")

    def close(self) -> None:
        """Leaves the bar as it stands and starts a new line."""
        if self._line:
            self._line = ""
            self._write("\n")

    def _time_left(self, now: float, step: int, total: int) -> float | None:
        assert self._start is not None
        began, first = self._start
        return (total - step) * (now - began) / (step - first) if step > first else None

    def _write(self, text: str) -> None:
        """Writes to the stream; a closed or full one ends nothing."""
        if self._closed or self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._closed = True  # the reader has gone (`| head`), or the stream was closed
        except OSError:
            pass  # a file on a full disk; the next line may find room


def render(
    step: int,
    total: int,
    loss: float | None,
    headline: tuple[str, float | None],
    examples_per_s: float | None,
    seconds_left: float | None,
    columns: int = 0,
) -> str:
    """Returns the bar's text: in full words where `columns` is 0, else in as many as fit.

    A line never exceeds `columns`: one that a terminal wraps could not be redrawn.
    """
    share = min(1.0, step / total) if total > 0 else 1.0
    name, value = headline
    shown = (
        "–" if value is None else f"{100 * value:.1f}%" if "accuracy" in name else f"{value:.4g}"
    )
    fields = {
        "steps": f"{'' if columns else 'step '}{step:>{len(str(total))}}/{total}",
        "loss": f"loss {'–' if loss is None else f'{loss:.3g}'}",
        "headline": f"{name.replace('_', ' ')} {shown}",
        "speed": (
            f"{'–' if examples_per_s is None else f'{examples_per_s:,.0f}'}"
            f" {'ex/s' if columns else 'examples/s'}"
        ),
        "left": f"{'–' if seconds_left is None else duration(seconds_left)} left",
    }
    text = "  ".join(fields.values())
    length = min(BAR, columns - len(text) - 2)
    if length >= 5:
        full = int(length * share)
        return f"{'━' * full}{'─' * (length - full)}  {text}"
    percent = f"{100 * share:3.0f}%"
    for spare in ("", *SPARE):
        fields.pop(spare, "")
        line = "  ".join([percent, *fields.values()])
        if not columns or len(line) <= columns:
            return line
    # half a number would be a wrong one
    return percent.strip() if len(percent.strip()) <= columns else "…"


def duration(seconds: float) -> str:
    """Formats seconds as `0:48`, `12:03` or `3:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
