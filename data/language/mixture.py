"""Mixes several corpora in fixed shares: which corpus a position visits follows from the position.

Shares are whole numbers out of a `period`. After any n visits, the number of visits to each corpus
is within 1 of n × its share: its k-th visit comes no earlier than floor(k / share) and before
ceil((k + 1) / share). Serving whichever corpus is due first always succeeds ("Pfair" scheduling
with one processor). A table holds one period; all periods are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from utils.errors import ConfigError

LONGEST = 100_000  # visits in a period: 0.2 seconds to make, and less than a megabyte


class Mixture:
    """Corpora by number, and how often each has been visited before."""

    def __init__(self, key: str, weights: Mapping[str, float]) -> None:
        """`key` names the weights in messages."""
        # as the user wrote it: 0.7 is seven tenths
        exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        scaled = [int(weight * scale) for weight in exact.values()]
        # visits to each corpus in a period
        self.counts = np.array([number // gcd(*scaled) for number in scaled], np.int64)
        self.period = sum(int(number) // gcd(*scaled) for number in scaled)
        if self.period > LONGEST:
            rounded = {
                name: max(1, round(1000 * float(weight / sum(exact.values()))))
                for name, weight in exact.items()
            }
            shown = ", ".join(f"{name}: {number}" for name, number in rounded.items())
            raise ConfigError(
                f"{key}: the weights have too many digits to be kept exactly; round them, for"
                f" example {{{shown}}}"
            )
        self._which = np.array(_schedule(self.counts.tolist()), np.int64)
        # visits to the same corpus earlier in the period
        self._before = np.empty(self.period, np.int64)
        for number, count in enumerate(self.counts):
            self._before[self._which == number] = np.arange(count)

    def visits(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the corpus of each position, and how often it was visited before."""
        periods, places = np.divmod(positions, self.period)
        which = self._which[places]
        return which, periods * self.counts[which] + self._before[places]


def _schedule(counts: list[int]) -> list[int]:
    """Returns the corpus of each position of a period: among those allowed there, the one due
    first.
    """
    period, visits = sum(counts), []
    # (first position at which it may come, corpus, number of the visit)
    waiting = [(0, number, 0) for number in range(len(counts))]
    due: list[tuple[int, int, int]] = []  # (last position, corpus, visit)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, number, visit = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(visit + 1) * period // counts[number]) - 1, number, visit))
        last, number, visit = heapq.heappop(due)
        assert position <= last
        visits.append(number)
        heapq.heappush(waiting, ((visit + 1) * period // counts[number], number, visit + 1))
    return visits
