"""Metrics are (sum, count) pairs: added on the device, reduced over ranks when they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from utils.ranks.distributed import Dist
from utils.transfer import widest

CPU = torch.device("cpu")
Z = 1.959964  # standard deviations within which 95 % lie


def stack(sums: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the sums and counts as one (metrics, 2) tensor, in the order of sorted names."""
    pairs = [sums[name] for name in sorted(sums)]
    parts = [torch.as_tensor(part).detach() for pair in pairs for part in pair]
    device = next((part.device for part in parts if not part.is_cpu), CPU)  # counts may be ints
    return torch.stack([part.to(device, widest(device)) for part in parts]).view(-1, 2)


def means(names: list[str], sums_M2: Tensor) -> dict[str, float]:
    """Returns the mean of each metric whose count is not 0."""
    return {
        name: total / count
        for name, (total, count) in zip(names, sums_M2.tolist(), strict=True)
        if count
    }


class Meter:
    """Adds up metrics on the device. Only `read` waits for it.

    Each shard has its own row, and `read` adds the rows in order. So results have the same bits at
    any number of ranks if the shards' sums have.
    """

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._names: list[str] = []
        self._sums: Tensor | None = None  # (shards, metrics, 2)
        self._restored = False

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor]], shard: int = 0) -> None:
        """Adds the metrics of a micro-batch to the row of `shard`, its first one."""
        names, values = sorted(sums), stack(sums)
        if self._restored and names != self._names:
            self._sums = None  # other code wrote the checkpoint, and measured other things
        self._restored = False
        assert self._sums is None or names == self._names, (
            f"metrics changed from {self._names} to {names}"
        )
        if self._sums is None:
            self._names, self._sums = names, values.new_zeros(self._shards, *values.shape)
        self._sums[shard] += values

    def read(self, dist: Dist) -> dict[str, float]:
        """Returns means over all ranks since the last read. Called on every rank, even if it has
        nothing to add.
        """
        every = dist.all_gather_text("\n".join(self._names if self._sums is not None else []))
        names = next((text.split("\n") for text in every if text), [])
        differing = [rank for rank, text in enumerate(every) if text and text.split("\n") != names]
        assert not differing, f"ranks {differing} measured other metrics than {names}"
        if not names:
            return {}
        sums = self._sums
        if sums is None:
            shape, dtype = (self._shards, len(names), 2), widest(dist.device)
            sums = torch.zeros(shape, dtype=dtype, device=dist.device)
        dist.all_reduce(sums)
        self.clear()
        return means(names, sums.sum(0))

    def clear(self) -> None:
        self._names, self._sums = [], None

    def state(self, shards: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Returns the sums of these shards since the last read, for a checkpoint."""
        sums = self._sums
        return {
            shard: {}
            if sums is None
            else {name: sums[shard, i] for i, name in enumerate(self._names)}
            for shard in shards
        }

    def expected(self, saved: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns the shapes that a shard's saved sums must have. Names may differ: other code may
        have measured other metrics.
        """
        return {name: torch.empty(2, dtype=torch.float64, device="meta") for name in saved}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]], device: torch.device) -> None:
        self.clear()
        for shard, sums in saved.items():
            if sums:
                self.add(
                    {name: (pair[0].to(device), pair[1].to(device)) for name, pair in sums.items()},
                    shard,
                )
                self._restored = True


class Clock:
    """Measures speed since `restart`: steps, examples, and time spent waiting."""

    def __init__(self, others: Mapping[str, Callable[[], float]]) -> None:
        """`others` by name: each returns the seconds that something waited since its last call."""
        self._others = others
        self.restart()

    def restart(self) -> None:
        self.start, self.steps, self.examples, self.waited = time.perf_counter(), 0, 0, 0.0
        for take in self._others.values():  # drops the waits that belong to the time before
            take()

    def tick(self, examples: int) -> None:
        self.steps += 1
        self.examples += examples

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context for waiting for data."""
        begun = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begun

    def speeds(self, tokens: int) -> dict[str, float]:
        """Returns average speeds and times for each step. An example has `tokens` tokens."""
        seconds, steps = max(time.perf_counter() - self.start, 1e-9), max(1, self.steps)
        waited = {"data_wait": self.waited} | {name: take() for name, take in self._others.items()}
        return {
            "speed/examples_per_s": self.examples / seconds,
            "speed/tokens_per_s": self.examples * tokens / seconds,
            "speed/step_ms": 1e3 * seconds / steps,
        } | {f"speed/{name}_ms": 1e3 * each / steps for name, each in waited.items()}


def wilson(successes: float, among: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share after Wilson (1927), which stays within 0 to 1."""
    share, spread = successes / among, Z**2 / among
    centre = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * (share * (1 - share) / among + spread / (4 * among)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Returns metrics as one line of the log."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
