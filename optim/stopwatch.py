"""Time spent waiting, measured where the waiting happens: on the host for the CPU, on the stream
for CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up spans; on CUDA with events, so that measuring never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))

    def read(self) -> float:
        """Seconds since the last reading."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds, self._spans = self._seconds, 0.0, []
        return seconds
