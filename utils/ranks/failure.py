"""The report of a rank that cannot go on, and the reason that all ranks hear when the run ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# how long a rank waits before it leaves: launchers kill the others when one has gone, and those may
# still have something to print or close
LINGER_S = 1.5

# Which report of an end counts, the best first: the user has read it already; a rank found an
# error; a rank ended; the end of another rank led to this error.
PRINTED, FOUND, ENDED, ECHO = KINDS = ("printed", "found", "ended", "echo")


@dataclass(frozen=True)
class Failure:
    """One line, and a traceback if the error was unexpected."""

    text: str
    status: int = 1
    kind: str = FOUND
    trace: str = ""

    def message(self, where: str = "") -> str:
        """Returns the error as the user reads it."""
        return f"error{where}: {self.text}" + (f"\n{self.trace}" if self.trace else "")

    def row(self) -> list[Any]:
        """For a message: short enough for one even if each character takes twelve bytes."""
        trace = (
            self.trace
            if len(self.trace) < 8000
            else f"{self.trace[:2000]}\n…\n{self.trace[-5900:]}"
        )
        return [self.text[:2000], self.status, self.kind, trace]

    @classmethod
    def from_row(cls, row: Any) -> Failure:
        """The inverse of `row`; raises an error if the row is malformed."""
        text, status, kind, trace = row
        return cls(str(text), int(status), KINDS[KINDS.index(kind)], str(trace))


def summary(error: BaseException) -> str:
    """The type of an unexpected error, and the first line of its text."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # a __str__ of its own
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
