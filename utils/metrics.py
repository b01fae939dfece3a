"""Metrics are (sum, count) pairs: added on the device, reduced over ranks only when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from utils.distributed import Dist

MetricSums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def stack(sums: MetricSums) -> torch.Tensor:
    """One (metrics, 2) tensor in the order of the sorted names."""
    return torch.stack([torch.stack([part.detach().to(torch.float64) for part in sums[name]]) for name in sorted(sums)])


def means(names: list[str], sums_M2: torch.Tensor) -> dict[str, float]:
    """The mean of every metric that counted anything."""
    return {name: total / count for name, (total, count) in zip(names, sums_M2.tolist(), strict=True) if count}


class Meter:
    """Adds up metrics on the device; `read` is the only place that waits for it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: torch.Tensor | None = None

    def add(self, sums: MetricSums) -> None:
        names, values = sorted(sums), stack(sums)
        assert self._sums is None or names == self._names, f"metrics changed from {self._names} to {names}"
        self._names, self._sums = names, values if self._sums is None else self._sums + values

    def read(self, dist: Dist) -> dict[str, float]:
        """Means over all ranks since the last read; every rank must call it, also one that had nothing to add."""
        every = dist.all_gather_text("\n".join(self._names if self._sums is not None else []))
        names = next((text.split("\n") for text in every if text), [])
        differing = [rank for rank, text in enumerate(every) if text and text.split("\n") != names]
        assert not differing, f"ranks {differing} measured other metrics than {names}"
        if not names:
            return {}
        sums = self._sums if self._sums is not None else torch.zeros(len(names), 2, dtype=torch.float64, device=dist.device)
        dist.all_reduce(sums)
        self._names, self._sums = [], None
        return means(names, sums)


class Clock:
    """Speed since it was made: steps, examples, and time spent waiting for data."""

    def __init__(self) -> None:
        self.start, self.steps, self.examples, self.waited = time.perf_counter(), 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.start, 1e-9)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what the step waits for."""
        begun = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begun
