"""Learning-rate schedules: a step counted from 1 in, the factor on the base rate out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from contract import RunLength
from utils.command.instantiate import make
from utils.command.marks import Fraction
from utils.errors import ConfigError, brief


@dataclass(frozen=True)
class WarmupDecay:
    """Linear warm-up to the base rate, then decay to `min_ratio` of it at the last step.

    By default, the decay is half a cosine that starts right after the warm-up, as in HRM. With
    `decay_share`, the base rate stays until only that share of the steps is left, and then decays
    linearly (WSD, Hu et al. 2024, arXiv 2404.06395).
    """

    length: RunLength
    warmup_steps: NonNegativeInt
    min_ratio: Fraction
    decay_share: Annotated[float, Field(gt=0, le=1)] | None

    def __call__(self, step: int) -> float:
        total_steps = self.length.total_steps
        if step < self.warmup_steps:
            return step / max(1, self.warmup_steps)
        if self.decay_share is not None:
            after_warmup = total_steps - self.warmup_steps
            decay_steps = min(self.decay_share * total_steps, after_warmup)
            left = (total_steps - step) / max(1, decay_steps)
            return self.min_ratio + (1 - self.min_ratio) * min(1.0, max(0.0, left))
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        return self.min_ratio + max(
            0.0, (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        )


@dataclass(frozen=True)
class StepDecay:
    """Multiplies the rate by `gamma` after every `every_epochs` epochs."""

    length: RunLength
    every_epochs: PositiveInt
    gamma: float

    def __call__(self, step: int) -> float:
        steps_per_epoch = self.length.steps_per_epoch  # not whole: a batch may straddle two epochs
        if steps_per_epoch is None:
            raise ConfigError(
                "optim.schedule._target_=optim.schedule.StepDecay: counts epochs, and this data has"
                " none; try optim.schedule.WarmupDecay"
            )
        # steps count from 1, so the first step of epoch e has done (e - 1) × steps_per_epoch
        return self.gamma ** (math.floor((step - 1) / steps_per_epoch) // self.every_epochs)


def build_schedule(config: Mapping[str, Any] | None, length: RunLength) -> Callable[[int], float]:
    """Builds the configured schedule for a run of this length. Without one, the rate stays."""
    if config is None:
        return lambda step: 1.0
    schedule: Callable[[int], float] = make(config, "optim.schedule", length)
    try:
        float(schedule(1))
    except TypeError as error:
        raise ConfigError(
            f"optim.schedule._target_={config['_target_']}: {brief(error)}; a schedule takes the"
            " step alone, and no metric, and returns a factor"
        ) from error
    return schedule


def set_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Sets every group's rate to `factor` times the rate it was built with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group["base_lr"] * float(factor)
            # a rate that is a tensor is read by a graph or a compiled step
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
