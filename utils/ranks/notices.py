"""Notices that ranks send each other with the gradients of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from utils.ranks import signals


@dataclass(frozen=True)
class Notices:
    """One rank's notices, each 0 or 1, or their sums over ranks and steps."""

    sigterm: float = 0.0  # this rank got the signal
    sigint: float = 0.0
    sigusr1: float = 0.0
    save_is_due: float = 0.0  # by rank 0's clock
    saves_fail: float = 0.0
    directory_is_lost: float = 0.0

    @classmethod
    def of_this_rank(cls, due: bool, failing: bool, lost: bool) -> Notices:
        """Makes this rank's notices, with the signal that its process has got."""
        sigterm, sigint, sigusr1 = signals.flags()
        return cls(sigterm, sigint, sigusr1, float(due), float(failing), float(lost))

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Notices:
        """Makes notices of what `numbers` returned, or of sums of it."""
        return cls(*numbers)

    def numbers(self) -> tuple[float, ...]:
        """Returns the numbers to send, which are summed over ranks."""
        return astuple(self)

    def signal(self) -> int:
        """Returns the signal that all ranks follow, or 0."""
        return signals.agreed_signal((self.sigterm, self.sigint, self.sigusr1))

    def __add__(self, other: Notices) -> Notices:
        return Notices(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def __bool__(self) -> bool:
        return any(self.numbers())


NOTICES = len(fields(Notices))  # how many numbers they are
NONE = Notices()
