"""How long a step takes on many GPUs: a prediction from what one process measures and what links
are said to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Between GPUs of one node, and between nodes: what one GPU's neighbour in the ring receives a
    second, and how long a message takes.
    """

    within_gb_s: float
    between_gb_s: float
    latency_us: float
    gpus_per_node: int

    def all_reduce_s(self, size: int, gpus: int) -> float:
        """In 2 (gpus - 1) rounds each GPU hands on a gpus-th part of so many bytes; all links work
        at once, and the slowest counts.
        """
        if gpus == 1:
            return 0.0
        speed = (
            self.within_gb_s
            if gpus <= self.gpus_per_node
            else min(self.within_gb_s, self.between_gb_s)
        )
        return 2 * (gpus - 1) * (size / gpus / (speed * 1e9) + self.latency_us / 1e6)


@dataclass(frozen=True)
class Timeline:
    """A step of one process alone, in seconds from its beginning."""

    backward_s: float  # when the last backward has ended
    step_s: float
    # when each may leave, in turn, and its bytes; the last one waits for the end of backward
    buckets: Sequence[tuple[float, int]]

    def faster(self, times: float) -> Timeline:
        """The same on a device that computes so many times as fast."""
        return Timeline(
            self.backward_s / times,
            self.step_s / times,
            [(at / times, size) for at, size in self.buckets],
        )

    def on(self, gpus: int, links: Links, overlaps: bool = True) -> float:
        """Seconds of a step on so many; one bucket travels at a time, behind the backward if
        `overlaps`, else after it.
        """
        free = 0.0
        for number, (at, size) in enumerate(self.buckets, 1):
            leaves = at if overlaps and number < len(self.buckets) else self.backward_s
            free = max(free, leaves) + links.all_reduce_s(size, gpus)
        return max(free, self.backward_s) + self.step_s - self.backward_s
