"""The contract of everything that is optimised: sums out, never means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.frozen import Frozen
from models.graphs import keep_what_outlives_a_replay
from models.sparse_embedding import ShardedEmbedding, SparseEmbedding
from utils import transfer
from utils.command.instantiate import make
from utils.measure.hardware import count_flops
from utils.measure.metrics import Metric, MetricSums
from utils.measure.report import Evaluator, Prediction
from utils.noise import Noise
from utils.ranks.distributed import Dist
from utils.spec import Spec

Batch = dict[str, Tensor]
T = TypeVar("T")
Carry = Any  # what an objective keeps between steps: a dataclass of tensors whose first dimension is the slot


@dataclass(frozen=True)
class Context:
    """What a step may depend on beside its batch."""

    progress: float  # the share of the steps that are done
    noise: Noise  # of this step, for the shards of this batch
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # of `statistics`, over all shards of the step


@dataclass(frozen=True)
class StepOut:
    """One micro-batch's share of a step."""

    loss: Tensor  # SUM over the local examples
    weight: Tensor  # what the global sum is divided by
    metrics: MetricSums
    carry: Carry = None


class Objective(nn.Module):
    """Wraps a net as `self.model` and says what to minimise."""

    headline = Metric("accuracy")  # what a run is judged by when `objective_metric` names nothing
    costs: frozenset[str] = frozenset()  # other metrics of which less is better
    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def place(self, dist: Dist) -> None:
        """Where this rank computes; of a table that is shared out, what rank 0 has of this rank's rows. On all ranks together."""
        for table in self.tables().values():
            if isinstance(table, ShardedEmbedding):
                table.share_out(dist)
        with dist.agreed():
            self.to(dist.device)

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Once, before step 0 and never after a resume, with noise for this rank's shards; most objectives need none.

        It may change values in place, of what `saved` holds alone, and the same way on every rank: add over `dist` what a
        rank finds in its shards.
        """

    def initial_carry(self, batch: Batch) -> Carry:
        """The state before the first step; most objectives keep none."""
        return None

    def look_ahead(self, parts: Sequence[tuple[Batch, Carry]], alone: bool = False) -> None:
        """Once a step, before its passes and on all ranks together: have what each pass needs of other ranks; most need nothing.

        `alone`: other ranks are not asked, and numbers do not matter.
        """

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Sums over this batch of what the loss must know of all shards: `forward` finds the totals in its context.

        Without gradients, in a pass of its own. Names and shapes are the same for every batch.
        """
        return {}

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        raise NotImplementedError

    def predict(self, batch: Batch) -> Prediction:
        """Evaluate one batch; owns any loop over the net."""
        raise NotImplementedError

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        """What this objective's predictions tell beyond means, of a set whose batches have what this one has; made anew for each."""
        return ()

    def tables(self) -> dict[str, SparseEmbedding]:
        """The sparse tables that train, by name, for the sparse optimizer."""
        return self._without_frozen({name: module for name, module in self.named_modules() if isinstance(module, SparseEmbedding)})

    def shardable(self) -> Sequence[nn.Module]:
        """Parts of the net whose weights may lie split over ranks while other parts compute: only their own forward uses them.

        Neither `initial_carry` nor a net's other methods find weights whole then; `forward`, `statistics` and `predict` do.
        """
        return ()

    def placeable(self) -> Sequence[nn.Module]:
        """Frozen parts of the net that `place` may put on devices of their own."""
        return ()

    def trained(self) -> dict[str, nn.Parameter]:
        """What optimizers may claim, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def frozen(self) -> dict[str, dict[str, str]]:
        """Where the frozen parts come from, and the hash by which their files are known."""
        parts = self.named_modules(remove_duplicate=False)  # a part may be reached by several names
        return {name: {"path": part.path, "sha256": part.sha256} for name, part in parts if isinstance(part, Frozen)}

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds, and what is the same on every rank; the tensors are live. Frozen parts are not in it."""
        return self._without_frozen(self.state_dict())

    def load_saved(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in what `saved` gave."""
        wrong = sorted(self.saved().keys() ^ tensors.keys())
        if wrong:
            raise KeyError(f"{wrong[0]} is only in the net or only in what is loaded")
        self.load_state_dict(dict(tensors), strict=False)

    def published(self, path: str) -> Mapping[str, Tensor] | None:
        """What `saved` holds, read from where others publish such a net in a form of their own; None where nobody does."""
        return None

    def shared(self) -> dict[str, Tensor]:
        """What rank 0 sends to all ranks: all that is saved, and buffers that are not, but no tables that are shared out."""
        own = {f"{name}.weights" for name, table in self.tables().items() if isinstance(table, ShardedEmbedding)}
        everything = self.saved() | self._without_frozen(dict(self.named_buffers()))
        return {name: tensor for name, tensor in everything.items() if name not in own}

    def judged_by(self, asked: str | None) -> Metric:
        """The metric of evaluations that tells the best checkpoint: the headline, or what the user asked for."""
        if not asked:
            return Metric(f"eval/{self.headline.name}", self.headline.lower)
        metric = Metric.parse(asked)
        own = {*self.costs, *([self.headline.name] if self.headline.lower else [])}
        return Metric(metric.name, metric.lower or metric.name.rpartition("/")[2] in own)

    def rehearse(self, batch: Batch, ctx: Context, keep: bool = False) -> None:
        """One forward and backward that leave no trace, but, to `keep`, gradients; as late in a run as nets are deepest."""
        try:
            carry = self.initial_carry(batch)
            with torch.no_grad():
                totals = self.statistics(batch, carry, ctx)
            self.look_ahead([(batch, carry)], alone=True)
            self(batch, carry, replace(ctx, totals=totals, progress=1.0)).loss.backward()
        finally:
            self.zero_grad(set_to_none=not keep)
            for table in self.tables().values():
                table.take()

    def flops_per_example(self, batch: Batch, ctx: Context) -> int:
        """Operations of one example's forward and backward."""
        return count_flops(lambda: self.rehearse(batch, ctx)) // len(next(iter(batch.values())))

    def compile_net(self, graphs: bool = False) -> None:
        """Compile in place, so that state-dict keys stay clean; with `graphs`, CUDA replays every pass as one graph."""
        self.model.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
        if graphs:
            keep_what_outlives_a_replay(self)

    def _without_frozen(self, named: Mapping[str, T]) -> dict[str, T]:
        inside = tuple(f"{name}." for name in self.frozen())
        return {name: thing for name, thing in named.items() if not name.startswith(inside)}


def make_objective(arch: Any, seed: int, spec: Spec, device: torch.device | None = None) -> Objective:
    """A net and its loss, with weights as they begin: drawn on the CPU for every device."""
    with torch.random.fork_rng(devices=[]), nullcontext() if device is None else device:
        torch.manual_seed(seed)  # initialisers draw from the global generator
        net = make({key: value for key, value in arch.items() if key != "loss"}, "arch", spec)
        objective: Objective = make(arch["loss"], "arch.loss", net)
    return objective.to(device, torch.float64 if objective.model.dtype == torch.float64 else None)


def to_device(batch: dict[str, Tensor], device: torch.device) -> Batch:
    """Move a batch without waiting for it."""
    return {name: transfer.to_device(tensor, device) for name, tensor in batch.items()}
