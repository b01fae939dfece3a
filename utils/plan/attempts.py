"""`micro_batch_size=auto`: found by running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from utils.errors import ConfigError


def largest_that_fits(
    most: int, attempt: Callable[[int], object], parameters: Iterable[Tensor], smallest: str
) -> int:
    """Halves from `most` until `attempt` has enough memory, for `micro_batch_size=auto` on a GPU;
    `smallest` is for the error.
    """
    # What the optimizer will hold from its first step on, mostly two moments a weight, must fit
    # beside it.
    moments = [torch.empty_like(parameter) for parameter in parameters for _ in range(2)]
    size = most
    while True:
        try:
            attempt(size)
            del moments
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
