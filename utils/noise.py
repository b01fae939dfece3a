"""Random numbers as a pure function of (seed, step, shard, stream name)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from utils.distributed import CPU


@dataclass(frozen=True)
class Noise:
    """The noise of some shards at one step. The first dimension of a shape runs over their slots in order."""

    seed: int
    step: int
    shards: Sequence[int]
    device: torch.device = CPU

    def uniform(self, stream: str, shape: Sequence[int]) -> torch.Tensor:
        """Uniform in [0, 1)."""
        return self._draw(stream, shape, lambda size, generator: torch.rand(size, generator=generator, device=self.device))

    def integers(self, stream: str, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
        """Whole numbers in [low, high)."""
        return self._draw(stream, shape, lambda size, generator: torch.randint(low, high, size, generator=generator, device=self.device))

    def normal(self, stream: str, shape: Sequence[int]) -> torch.Tensor:
        """Standard normal."""
        return self._draw(stream, shape, lambda size, generator: torch.randn(size, generator=generator, device=self.device))

    def _draw(self, stream, shape, sample) -> torch.Tensor:
        slots, uneven = divmod(shape[0], len(self.shards))
        assert not uneven, f"{shape[0]} slots cannot belong to {len(self.shards)} shards"
        size = (slots, *shape[1:])
        return torch.cat([sample(size, self._generator(stream, shard)) for shard in self.shards])

    def _generator(self, stream: str, shard: int) -> torch.Generator:
        key = np.random.SeedSequence([self.seed, self.step, shard, zlib.crc32(stream.encode())]).generate_state(1, np.uint64)[0]
        return torch.Generator(self.device).manual_seed(int(key >> np.uint64(1)))
