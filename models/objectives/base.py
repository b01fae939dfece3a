"""The contract of everything that is optimised: sums out, never means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.sparse_embedding import SparseEmbedding
from utils.measure.hardware import count_flops
from utils.measure.metrics import Metric, MetricSums
from utils.noise import Noise
from utils.ranks.distributed import Dist

Batch = dict[str, Tensor]
Carry = Any  # what an objective keeps between steps: a dataclass of tensors whose first dimension is the slot


@dataclass(frozen=True)
class Context:
    """What a step may depend on beside its batch."""

    progress: float  # 0 at the first step, 1 at the last
    noise: Noise  # of this step, for the shards of this batch


@dataclass(frozen=True)
class StepOut:
    """One micro-batch's share of a step."""

    loss: Tensor  # SUM over the local examples
    weight: Tensor  # what the global sum is divided by
    metrics: MetricSums
    carry: Carry = None


@dataclass(frozen=True)
class Prediction:
    """What evaluation learns of one batch."""

    metrics: MetricSums
    outputs: dict[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module):
    """Wraps a net as `self.model` and says what to minimise."""

    headline = Metric("accuracy")  # what a run is judged by when `objective_metric` names nothing
    costs: frozenset[str] = frozenset()  # other metrics of which less is better
    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def prepare(self, dist: Dist) -> None:
        """Work before the first step; most objectives need none."""

    def initial_carry(self, batch: Batch) -> Carry:
        """The state before the first step; most objectives keep none."""
        return None

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        raise NotImplementedError

    def predict(self, batch: Batch) -> Prediction:
        """Evaluate one batch; owns any loop over the net."""
        raise NotImplementedError

    def tables(self) -> dict[str, SparseEmbedding]:
        """The sparse tables by name, for the sparse optimizer."""
        return {name: module for name, module in self.named_modules() if isinstance(module, SparseEmbedding)}

    def judged_by(self, asked: str | None) -> Metric:
        """The metric of evaluations that tells the best checkpoint: the headline, or what the user asked for."""
        if not asked:
            return Metric(f"eval/{self.headline.name}", self.headline.lower)
        metric = Metric.parse(asked)
        own = {*self.costs, *([self.headline.name] if self.headline.lower else [])}
        return Metric(metric.name, metric.lower or metric.name.rpartition("/")[2] in own)

    def rehearse(self, batch: Batch, ctx: Context) -> None:
        """One forward and backward that leave no trace."""
        try:
            self(batch, self.initial_carry(batch), ctx).loss.backward()
        finally:
            self.zero_grad()
            for table in self.tables().values():
                table.take()

    def flops_per_example(self, batch: Batch, ctx: Context) -> int:
        """Operations of one example's forward and backward."""
        return count_flops(lambda: self.rehearse(batch, ctx)) // len(next(iter(batch.values())))

    def compile_net(self) -> None:
        """Compile in place, so that state-dict keys stay clean."""
        self.model.compile(dynamic=False)


def to_device(batch: dict[str, Tensor], device: torch.device) -> Batch:
    """Move a batch without waiting for it."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
