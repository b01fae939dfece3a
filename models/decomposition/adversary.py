"""Finds the masks under which a net errs most, by ascent along the signs of gradients: projected
gradient descent (PGD) in the published trainer.

A source is a number from 0 to 1 that sets a mask: at 0 it equals its gate, at 1 it is open.
"""

# B batch, W sources of an input: one for each component, and one for each remainder if it is
# masked, … positions, if there are any

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.errors import ConfigError
from utils.noise import Noise

# returns the net's error under the masks of these sources, summed over rows
TotalError = Callable[[Tensor], Tensor]
INITS = ("random", "ones", "zeroes")
GRADIENT = "source_gradient/"  # and the number of a step: the name of its sum over the batch


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
        if self.persistent and self.shared:
            raise ConfigError(
                "arch.loss.adversarial.persistent=true: continues from the masks of each row, which"
                " scope=batch does not have; use arch.loss.adversarial.scope=row"
            )

    @property
    def shared(self) -> bool:
        """True if all rows of a batch have the same masks."""
        return self.scope == "batch"

    def initial_sources(self, drawn: Tensor, noise: Noise) -> Tensor:
        """Returns the sources from which ascent starts: `drawn` [B, 1, …, W] or constants. If all
        rows share masks they are [1, 1, …, W], and the same on all ranks.
        """
        if self.shared:
            shape = (*(1 for _ in drawn.shape[1:]), drawn.shape[-1])
            of_step = Noise(noise.seed, noise.step, [0], noise.device)
            drawn = of_step.uniform("shared masks", shape).to(drawn.dtype)
        if self.init == "random":
            return drawn
        return torch.full_like(drawn, float(self.init == "ones"))

    def ascend(self, sources: Tensor, total_error: TotalError, steps: int) -> Tensor:
        """Returns the sources after this many steps."""
        for _ in range(steps):
            sources = self.step(sources, source_gradient(sources, total_error))
        return sources

    def ascend_along(self, sources: Tensor, totals: Mapping[str, Tensor]) -> Tensor:
        """Returns the sources after the steps whose gradients are already summed over the batch."""
        for number in range(self.steps):
            if (total := totals.get(f"{GRADIENT}{number}")) is not None:
                sources = self.step(sources, total.to(sources.dtype))
        return sources

    def step(self, sources: Tensor, gradient: Tensor) -> Tensor:
        return (sources + self.rate * gradient.sign()).clamp_(0, 1)


def source_gradient(sources: Tensor, total_error: TotalError) -> Tensor:
    with torch.enable_grad():
        sources = sources.detach().requires_grad_()
        return torch.autograd.grad(total_error(sources), sources)[0]
