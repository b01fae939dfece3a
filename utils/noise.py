"""Random numbers as a pure function of (seed, step, shard, stream name), the same on every device.

PyTorch's generators draw other numbers on CUDA than on a CPU. Here, the n-th number of a shard's
stream is a hash of n and the stream's key, in 32-bit integer arithmetic, which is exact everywhere.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from utils.transfer import to_device

# the standard deviation of a standard normal distribution that is cut at two sigma
LEFT_BY_CUTTING = 0.87962566103423978


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which the global generators of PyTorch, NumPy and Python begin at the seed, for
    constructors that draw from them. Leaves them as they were.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def generator(seed: int, stream: str, *key: int) -> np.random.Generator:
    """Returns NumPy's generator for one stream and key, such as a step. Use each pair only once."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), *key])


@dataclass(frozen=True)
class Noise:
    """The random numbers of some shards at one step, by the name of a stream: the same on every
    device and at any number of ranks. The first dimension of a shape runs over the shards' examples
    in order.
    """

    seed: int
    step: int
    shards: Sequence[int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def uniform(self, stream: str, shape: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Draws uniformly from [0, 1), in multiples of 2⁻²⁴, which float32 holds exactly.

        With `rows`, draws only the numbers of these examples.
        """
        bits = self._bits(stream, shape, rows)
        return bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)

    def integers(self, stream: str, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Draws integers from [low, high)."""
        assert 0 < high - low < 2**24, (
            f"[{low}, {high}) is empty or too wide to be drawn evenly from 31 bits"
        )
        bits = self._bits(stream, shape)
        return bits.bitwise_and_(0x7FFFFFFF).to(torch.int64).remainder_(high - low).add_(low)

    def normal(self, stream: str, shape: Sequence[int]) -> Tensor:
        """Draws standard normal numbers. Devices differ only in how they round log and cos."""
        # 1 - u is never 0
        radius = (1 - self.uniform(f"{stream}/radius", shape)).log_().mul_(-2).sqrt_()
        return radius.mul_(self.uniform(f"{stream}/angle", shape).mul_(2 * math.pi).cos_())

    def truncated_normal(self, stream: str, shape: Sequence[int]) -> Tensor:
        """Draws from a normal distribution, cut at two sigma, with a standard deviation of 1."""
        within = self.uniform(stream, shape).mul_(2).sub_(1).mul_(math.erf(math.sqrt(2)))
        return within.erfinv_().mul_(math.sqrt(2) / LEFT_BY_CUTTING)

    def _bits(self, stream: str, shape: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Returns 32 random bits for every element, or for those of some rows."""
        shards, device = self.shards, self.device
        slots, uneven = divmod(shape[0], len(shards))
        assert not uneven, f"{shape[0]} slots cannot belong to {len(shards)} shards"
        per_slot = math.prod(shape[1:])
        of_shards = np.stack([_key(self.seed, self.step, shard, stream) for shard in shards])
        keys = to_device(torch.from_numpy(of_shards), device)
        if rows is None:
            counter = torch.arange(slots * per_slot, dtype=torch.int32, device=device)
            before, after = keys[:, :1], keys[:, 1:]
        else:
            counter = (rows % slots * per_slot).int().unsqueeze(1) + torch.arange(
                per_slot, dtype=torch.int32, device=device
            )
            before, after = keys[rows // slots].split(1, dim=1)
        # two keys, so that streams whose first keys are close do not share a sequence
        bits = _mix_(counter + before).bitwise_xor_(after)
        return _mix_(bits).view(shape[0] if rows is None else len(rows), *shape[1:])


class Dropout(nn.Module):
    """Sets a share of the values to 0 in training, by masks that depend on the seed, the step, the
    shard and this layer's name alone; `nn.Dropout` draws others on other ranks.

    The first dimension of what it gets runs over the examples of the batch. All its calls in one
    step have the same mask.
    """

    noise: Noise | None = None  # set by `Objective` before each forward pass
    stream = "dropout"  # the layer's name in the net

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask(x) if self.training and self.noise is not None and self.rate else x

    def mask(self, x: Tensor) -> Tensor:
        assert self.noise is not None
        kept = self.noise.uniform(self.stream, x.shape) >= self.rate
        return (kept / (1 - self.rate)).to(x.dtype)


def dropouts_of(net: nn.Module) -> list[Dropout]:
    """Returns the dropout layers of a net, which draw from streams of their names from now on: the
    same on every rank and after a resume.
    """
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, Dropout)}
    for name, layer in layers.items():
        layer.stream = name
    return [*layers.values()]


def give_noise(layers: Iterable[Dropout], noise: Noise) -> None:
    """Gives dropout layers the noise of their next pass."""
    for layer in layers:
        layer.noise = noise


def _key(seed: int, step: int, shard: int, stream: str) -> np.ndarray:
    words = [seed, step, shard, zlib.crc32(stream.encode())]
    return np.random.SeedSequence(words).generate_state(2).view(np.int32)


def _mix_(x: Tensor) -> Tensor:
    """Hashes 32-bit integers in place, by MurmurHash3's finaliser: a bijection in which every bit
    depends on every other.
    """
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, None)):
        # the mask makes PyTorch's arithmetic shift a logical one
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            x.mul_(factor)
    return x
