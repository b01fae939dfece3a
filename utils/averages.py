"""How much of an exponential moving average is left after some steps.

The rate of step t is `rate`, or with a warm-up min(rate, (1 + t) / (10 + t)): without one, an
average of a short run consists mostly of the weights that it began with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 1 << 20  # steps of a warm-up: it ends here even if the rate is very near 1
DIGIT = 1 << 11  # three digits of this base make any number of steps


class Decay:
    """Rates of an average by step, counted from 1, and products of them.

    The products come from tables, because `pow` may round a number differently by its position in
    a tensor, and a rank may hold only a part of it.
    """

    def __init__(self, rate: float, warms_up: bool, device: torch.device | None = None) -> None:
        # (1 + t) / (10 + t) reaches the rate in this step
        steps = min(math.ceil((10 * rate - 1) / (1 - rate)), LONGEST) if warms_up else 0
        self.rate, self._steps = rate, max(0, steps)
        rates = [1.0, *map(self.at, range(1, self._steps + 1))]
        # products of the first rates
        self._warm_up = torch.tensor(rates, dtype=torch.float64).cumprod(0).to(device)
        powers = [[rate ** (digit << shift) for digit in range(DIGIT)] for shift in (0, 11, 22)]
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)

    def at(self, step: int) -> float:
        """Returns the share of the old average that this step keeps."""
        return min(self.rate, (1 + step) / (10 + step)) if step <= self._steps else self.rate

    def between(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the product of the rates of all steps after `before`, up to `after`."""
        last = self._steps
        warm = self._warm_up[after.clamp(max=last)] / self._warm_up[before.clamp(max=last)]
        steps = after.clamp(min=last) - before.clamp(min=last)
        low, middle, high = (
            powers[(steps >> shift) % DIGIT]
            for shift, powers in zip((0, 11, 22), self._powers, strict=True)
        )
        return warm * (low * middle * high)
