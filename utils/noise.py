"""Random numbers as a pure function of (seed, step, shard, stream name), the same on every device.

PyTorch's generators draw other numbers on CUDA than on a CPU. Here, the n-th number of a shard's
stream is a hash of n and the stream's key, in 32-bit integer arithmetic, which is exact everywhere.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

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


def draw(
    where: tuple[int, int, Sequence[int]],
    stream: str,
    shape: Sequence[int],
    rows: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Returns 32 random bits for every element, or for the elements of some `rows`.

    `where` is the seed, the step and the shards; the first dimension of `shape` runs over the
    shards' examples in order.
    """
    seed, step, shards = where
    slots, uneven = divmod(shape[0], len(shards))
    assert not uneven, f"{shape[0]} slots cannot belong to {len(shards)} shards"
    per_slot = math.prod(shape[1:])
    keys = to_device(
        torch.from_numpy(np.stack([_key(seed, step, shard, stream) for shard in shards])), device
    )
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


def _key(seed: int, step: int, shard: int, stream: str) -> np.ndarray:
    words = [seed, step, shard, zlib.crc32(stream.encode())]
    return np.random.SeedSequence(words).generate_state(2).view(np.int32)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Hashes 32-bit integers in place, by MurmurHash3's finaliser: a bijection in which every bit
    depends on every other.
    """
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, None)):
        # the mask makes PyTorch's arithmetic shift a logical one
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            x.mul_(factor)
    return x
