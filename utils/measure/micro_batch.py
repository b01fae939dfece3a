"""How many shards go through the device at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from utils.errors import ConfigError


def shards_at_once(
    config: Any,
    shard_size: int,
    owned: int,
    device: torch.device,
    parameters: Iterable[Tensor],
    rehearse: Callable[[int], object],
) -> int:
    """Returns what `micro_batch_size` and `exact` ask for.

    Ranks may differ in it: results do not depend on it.
    """
    asked = config.micro_batch_size
    if isinstance(asked, int) and asked < shard_size:
        raise ConfigError(
            f"micro_batch_size={asked} is less than one shard of {shard_size} examples; raise it"
            f" to {shard_size}, or raise shards={config.shards}, which makes another run"
        )
    if config.exact:
        return 1
    if isinstance(asked, int):
        return asked // shard_size
    if asked is None or device.type != "cuda":
        return owned
    # What the optimizer will hold from its first step on, mostly two moments a weight, must fit
    # beside it.
    moments = [torch.empty_like(parameter) for parameter in parameters for _ in range(2)]
    size = largest_that_fits(owned, rehearse, f"one shard of {shard_size} examples")
    del moments
    return size


def largest_that_fits(most: int, attempt: Callable[[int], object], smallest: str) -> int:
    """Halves from `most` until `attempt` has enough memory; `smallest` is for the error."""
    size = most
    while True:
        try:
            attempt(size)
            return size
        except torch.OutOfMemoryError:
            # what the attempt held is freed outside the handler only: its traceback keeps the
            # tensors alive
            pass
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                f"micro_batch_size=auto: not even {smallest} fits into the memory; raise shards, or"
                " lower global_batch_size"
            )
        size = -(-size // 2)
