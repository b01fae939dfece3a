"""The contract of objectives: a net with a loss. They return sums, never means.

An objective wraps a net and defines `forward` and `predict`. All other methods are optional and
have defaults that suit most nets. models/README.md has a complete example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.frozen import Frozen
from models.layers import Dropout, cast_weights
from models.sparse_embedding import SparseEmbedding
from utils.command.instantiate import make
from utils.measure.evaluator import Batch, Evaluator, Prediction
from utils.measure.hardware import count_flops
from utils.measure.metrics import Metric, MetricSums
from utils.noise import Noise, seeded
from utils.ranks.distributed import Dist
from utils.spec import Spec
from utils.transfer import fill

T = TypeVar("T")
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


class Objective(nn.Module):
    """Wraps a net as `self.model` and says what to minimise: define `forward` and `predict`."""

    model: Any
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

    def call_net(self, *inputs: Tensor) -> Tensor:
        """Calls the net with its weights cast to `dtype`: layers of PyTorch need no care for it."""
        return functional_call(self.model, cast_weights(self.model, self.dtype), inputs)

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

    # optional: override what the objective needs

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Prepares the net for its first step, by the data or by some training of its own.

        Called once, on all ranks together, when a new run begins: neither after a resume nor for an
        evaluation. `source` is the run's data, `noise` that of this rank's shards at step 0.

        It may only change tensors that `saved` returns, in place, and must leave the same bits on
        every rank: what depends on a rank's shards is summed over `dist`. Default: does nothing.
        """

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry with which the slots of a micro-batch begin.

        A carry is a dataclass, dict or tuple of tensors whose first dimension is the slot. Called
        on each rank for its own shards, before the first step and after a skipped one; every other
        step gets the carry of the `StepOut` before it. Checkpoints hold it by shard. Default: None,
        nothing is remembered.
        """
        return None

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Returns sums over a micro-batch that the loss needs of the whole batch.

        Called on each rank for each micro-batch of a step, without gradients, before the first
        `forward`. They are summed over micro-batches and ranks, and `forward` finds them in
        `ctx.totals`. Names and shapes must be the same for every batch. Default: none.
        """
        return {}

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        """Returns fresh evaluators for a set whose batches have the same keys as `row`.

        Called on all ranks, once for each set of an evaluation. They get every batch of the set
        with its prediction; see `utils.measure.evaluator`. Default: none, only the means of
        `predict`.
        """
        return ()

    def move_to_devices(self, dist: Dist) -> None:
        """Moves the net to this rank's device.

        Called once, on all ranks together, after the net is built. Default: everything goes to
        `dist.device`.
        """
        with dist.agreed():
            self.to(dist.device)

    def shardable(self) -> Sequence[nn.Module]:
        """Returns the modules whose weights sync=fsdp may fetch and release one by one.

        Only a module's own forward may use its weights. They are whole within `forward`,
        `statistics`, `predict` and `evaluators`, and nowhere else. Called once, on all ranks.
        Default: none, the net is fetched as a whole.
        """
        return ()

    def published(self, path: str) -> Mapping[str, Tensor] | None:
        """Returns the tensors of `saved`, read from weights that others have published.

        Called for `init_from`, on rank 0. Returns None if `path` does not hold such weights, which
        is the default.
        """
        return None

    def compile_net(self) -> None:
        """Compiles in place, so that names in checkpoints stay as they are.

        Called once on each rank, before the first step, if the run compiles. Default: compiles
        `model` as a whole.
        """
        for layer in self.model.modules():
            if isinstance(layer, Dropout):  # each step has other noise, and would be compiled anew
                layer.mask = torch.compiler.disable(layer.mask)  # type: ignore[method-assign]
        self.model.compile(dynamic=False)

    # the rest follows from the above, and needs no override

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that optimizers may update, by name."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def tables(self) -> dict[str, SparseEmbedding]:
        """Returns the sparse tables that train, by name, for the sparse optimizer."""
        tables = {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, SparseEmbedding)
        }
        return self._without_frozen(tables)

    def frozen(self) -> dict[str, dict[str, str]]:
        """Returns the path and the hash of each frozen part, by its name."""
        # a part may be reached by several names
        modules = self.named_modules(remove_duplicate=False)
        return {
            name: {"path": part.path, "sha256": part.sha256}
            for name, part in modules
            if isinstance(part, Frozen)
        }

    def saved(self) -> dict[str, Tensor]:
        """Returns the live tensors that a checkpoint holds, without those of frozen parts."""
        return self._without_frozen(self.state_dict())

    def load_saved(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies in what `saved` returned; raises KeyError if the names differ."""
        own = self.saved()
        wrong = sorted(own.keys() ^ tensors.keys())
        if wrong:
            raise KeyError(f"{wrong[0]} is only in the net or only in what is loaded")
        for name, tensor in own.items():
            fill(tensor, tensors, name)

    def shared(self) -> dict[str, Tensor]:
        """Returns the tensors that rank 0 broadcasts: all that are saved, and other buffers."""
        return self.saved() | self._without_frozen(dict(self.named_buffers()))

    def _without_frozen(self, named: Mapping[str, T]) -> dict[str, T]:
        prefixes = tuple(f"{name}." for name in self.frozen())
        return {name: value for name, value in named.items() if not name.startswith(prefixes)}

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
    """Builds a net and its loss on `device`, with initial weights drawn on the CPU, from the
    global generators as initialisers do.
    """
    with seeded(seed), nullcontext() if device is None else device:
        net = make({key: value for key, value in arch.items() if key != "loss"}, "arch", spec)
        objective: Objective = make(arch["loss"], "arch.loss", net)
    return objective.to(device, torch.float64 if objective.dtype == torch.float64 else None)
