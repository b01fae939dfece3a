"""What a rank reports when it cannot go on, and what all ranks hear of why the run ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINGER_S = 1.5  # before a rank leaves: launchers kill the others when one has gone, and they may have something to read, say or close

# Whose account of an end counts, the best first: the user has read it already; the rank has found it; it is how a rank ended;
# it is what the end of another rank did to this one.
PRINTED, FOUND, ENDED, ECHO = KINDS = ("printed", "found", "ended", "echo")


@dataclass(frozen=True)
class Failure:
    """One line, and the traceback where nobody expected the error."""

    text: str
    status: int = 1
    kind: str = FOUND
    trace: str = ""

    def shown(self, where: str = "") -> str:
        """As the user reads it."""
        return f"error{where}: {self.text}" + (f"\n{self.trace}" if self.trace else "")

    def row(self) -> list[Any]:
        """For a message, which has room for so much, also where each character takes twelve bytes."""
        trace = self.trace if len(self.trace) < 8000 else f"{self.trace[:2000]}\n…\n{self.trace[-5900:]}"
        return [self.text[:2000], self.status, self.kind, trace]

    @classmethod
    def from_row(cls, row: Any) -> Failure:
        """Raises an error where it is none."""
        text, status, kind, trace = row
        return cls(str(text), int(status), KINDS[KINDS.index(kind)], str(trace))


def summary(error: BaseException) -> str:
    """The type of an error that was not made to be read, and the first line of what it says."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # a __str__ of its own
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
