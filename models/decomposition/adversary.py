"""Masks under which a net errs most, found by ascent along the signs of gradients: what the
published trainer calls PGD.
"""

# B batch, W numbers that a mask is drawn from, … positions, if there are any

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.errors import ConfigError
from utils.noise import Noise

# from sources to how much the net errs under them, in sum
Harm = Callable[[Tensor], Tensor]
INITS = ("random", "ones", "zeroes")


@dataclass(frozen=True)
class Adversary:
    """The keys under `arch.loss.adversarial`."""

    coefficient: float
    steps: int
    rate: float
    persistent: bool
    scope: str = "row"
    init: str = "random"
    evaluate: int = 0

    def __post_init__(self) -> None:
        if self.scope not in ("row", "batch"):
            raise ConfigError(
                f"arch.loss.adversarial.scope={self.scope}: choose row or batch, what has masks of"
                " its own"
            )
        if self.init not in INITS:
            raise ConfigError(
                f"arch.loss.adversarial.init={self.init}: choose one of {', '.join(INITS)}"
            )
        if self.persistent and self.shared:
            raise ConfigError(
                "arch.loss.adversarial.persistent=true: rows go on from masks of their own; use"
                " arch.loss.adversarial.scope=row"
            )

    @property
    def shared(self) -> bool:
        """True if all rows of a batch have the same masks."""
        return self.scope == "batch"

    def first(self, drawn: Tensor, noise: Noise) -> Tensor:
        """Returns the sources from which ascent begins: for every row [B, 1, …, W], as drawn or
        constant; for all rows [1, 1, …, W], which are the same for all shards.
        """
        if self.shared:
            shape = (*(1 for _ in drawn.shape[1:]), drawn.shape[-1])
            of_step = Noise(noise.seed, noise.step, [0], noise.device)
            drawn = of_step.uniform("shared masks", shape).to(drawn.dtype)
        if self.init == "random":
            return drawn
        return torch.full_like(drawn, float(self.init == "ones"))

    def climbed(self, sources: Tensor, harm: Harm, steps: int) -> Tensor:
        """Returns the sources after so many steps of ascent."""
        for _ in range(steps):
            sources = self.step(sources, uphill(sources, harm))
        return sources

    def climbed_together(self, sources: Tensor, totals: Mapping[str, Tensor]) -> Tensor:
        """Returns the sources after the steps for which the sums over the batch are known."""
        for number in range(self.steps):
            if (total := totals.get(sum_name(number))) is not None:
                sources = self.step(sources, total.to(sources.dtype))
        return sources

    def step(self, sources: Tensor, uphill: Tensor) -> Tensor:
        return (sources + self.rate * uphill.sign()).clamp_(0, 1)


def uphill(sources: Tensor, harm: Harm) -> Tensor:
    """Returns the gradient of the harm that sources do."""
    with torch.enable_grad():
        sources = sources.detach().requires_grad_()
        return torch.autograd.grad(harm(sources), sources)[0]


def sum_name(number: int) -> str:
    """Returns the name of the gradients of a step among the sums over the batch."""
    return f"uphill/{number}"
