"""The contract of objectives: a net with a loss. They return sums, never means.

An objective wraps a net and defines `forward` and `predict`. All other methods have defaults:
`Objective` has the core, models/optional_parts.py the rest. models/README.md has a complete
example.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.layers import Dropout
from models.optional_parts import (
    Compiles,
    HasCarry,
    HasEvaluators,
    LooksAhead,
    MovesToDevices,
    NeedsTotals,
    Prepares,
    ReadsPublished,
    SplitsWeights,
)
from utils.command.instantiate import make
from utils.measure.evaluator import Batch, Prediction
from utils.measure.hardware import count_flops
from utils.measure.metrics import Metric, MetricSums
from utils.noise import Noise
from utils.spec import Spec

Carry = Any  # a dataclass, dict or tuple of tensors whose first dimension is the slot


@dataclass(frozen=True)
class Context:
    """All that a step may depend on besides its batch and carry."""

    progress: float  # the share of the run's steps that is done
    noise: Noise  # random numbers of this step, for the shards of this batch
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # sums of what `statistics` returned


@dataclass(frozen=True)
class StepOut:
    """One micro-batch's share of a step."""

    loss: Tensor  # the SUM over the local examples, with gradients
    weight: Tensor  # gradients are divided by its sum over micro-batches and ranks
    metrics: MetricSums  # (sum, count) by name
    carry: Carry = None  # for the next step, without gradients


class Objective(
    Prepares,
    HasCarry,
    NeedsTotals,
    LooksAhead,
    HasEvaluators,
    MovesToDevices,
    SplitsWeights,
    ReadsPublished,
    Compiles,
):
    """Wraps a net as `self.model` and says what to minimise: define `forward` and `predict`."""

    headline = Metric("accuracy")  # the metric a run is judged by, unless objective_metric is given
    costs: frozenset[str] = frozenset()  # names of other metrics where lower is better

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._dropouts = []
        for name, layer in model.named_modules():
            if isinstance(layer, Dropout):
                layer.stream = name
                self._dropouts.append(layer)
        self.register_forward_pre_hook(_give_noise)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the net computes: its `dtype`, by default that of its weights."""
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return getattr(self.model, "dtype", None) or next(weights, torch.float32)

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        """Returns the loss of a micro-batch as a sum, its weight, metrics and the next carry.

        Called on each rank for each micro-batch of a step, in training mode and with gradients.
        `batch` holds whole shards of this rank, on its device; random numbers come from
        `ctx.noise` alone. Nothing here may talk to other ranks.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> Prediction:
        """Returns metrics as (sum, count) and outputs with one row for each example.

        Called on each rank for its batches of an evaluation, in evaluation mode and without
        gradients. Any loop over the net is in here. Rows that pad a batch have labels to ignore and
        must not count.
        """
        raise NotImplementedError

    def judging_metric(self, asked: str | None) -> Metric:
        """Returns the metric that tells the best checkpoint: `asked`, by default the headline."""
        if not asked:
            return Metric(f"eval/{self.headline.name}", self.headline.lower_is_better)
        metric = Metric.parse(asked)
        costs = {*self.costs, *([self.headline.name] if self.headline.lower_is_better else [])}
        is_cost = metric.name.rpartition("/")[2] in costs
        return Metric(metric.name, metric.lower_is_better or is_cost)

    def rehearse(self, batch: Batch, ctx: Context, keep: bool = False) -> None:
        """Runs one forward and backward pass on this rank alone, for measuring memory or FLOPs.

        Changes nothing, except that with `keep` the gradients stay. The pass has the `progress` of
        the last step, where nets are deepest.
        """
        try:
            carry = self.initial_carry(batch)
            with torch.no_grad():
                totals = self.statistics(batch, carry, ctx)
            self.look_ahead([(batch, carry)], alone=True)
            self(batch, carry, replace(ctx, totals=totals, progress=1.0)).loss.backward()
        finally:
            self.zero_grad(set_to_none=not keep)
            for table in self.tables().values():
                table.take_row_grads()

    def flops_per_example(self, batch: Batch, ctx: Context) -> int:
        """Returns the FLOPs of one example's forward and backward pass.

        Called once on each rank whose device has a known peak, with a batch of the first step.
        Default: counts those of `rehearse`.
        """
        return count_flops(lambda: self.rehearse(batch, ctx)) // len(next(iter(batch.values())))


def _give_noise(objective: Objective, arguments: tuple[Batch, Carry, Context]) -> None:
    """Hands the step's noise to the dropout layers before a forward pass."""
    for layer in objective._dropouts:
        layer.noise = arguments[2].noise


def make_objective(
    arch: Any, seed: int, spec: Spec, device: torch.device | None = None
) -> Objective:
    """Builds a net and its loss on `device`, with initial weights drawn on the CPU."""
    with torch.random.fork_rng(devices=[]), nullcontext() if device is None else device:
        torch.manual_seed(seed)  # initialisers draw from the global generator
        net = make({key: value for key, value in arch.items() if key != "loss"}, "arch", spec)
        objective: Objective = make(arch["loss"], "arch.loss", net)
    return objective.to(device, torch.float64 if objective.dtype == torch.float64 else None)
