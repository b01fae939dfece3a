"""The optional parts of an objective. `Objective` inherits them all, each with a default that suits
most nets; an objective overrides the methods of those that it needs.

| part              | an objective needs it if …                                           |
|-------------------|----------------------------------------------------------------------|
| `Prepares`        | something has to happen once, before the first step                  |
| `HasCarry`        | a slot of the batch remembers something from one step to the next    |
| `NeedsTotals`     | its loss depends on sums over the whole batch                        |
| `LooksAhead`      | its forward passes need something that other ranks hold              |
| `HasEvaluators`   | an evaluation reports more than means: votes, files, pictures        |
| `MovesToDevices`  | parts of the net lie on devices of their own                         |
| `SplitsWeights`   | sync=fsdp is to split the net block by block                         |
| `ReadsPublished`  | others publish weights of such nets in a form of their own           |
| `Compiles`        | torch.compile should take other modules than the whole net           |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.graphs import keep_what_outlives_a_replay
from models.layers import Dropout
from models.named_tensors import NamedTensors
from utils.measure.evaluator import Evaluator
from utils.noise import Noise
from utils.ranks.distributed import Dist

if TYPE_CHECKING:
    from models.objective import Batch, Carry, Context


class Prepares:
    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Prepares the net for its first step, by the data or by some training of its own.

        Called once, on all ranks together, when a new run begins: neither after a resume nor for an
        evaluation. `source` is the run's data, `noise` that of this rank's shards at step 0.

        It may only change tensors that `saved` returns, in place, and must leave the same bits on
        every rank: what depends on a rank's shards is summed over `dist`. Default: does nothing.
        """


class HasCarry:
    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry with which the slots of a micro-batch begin.

        A carry is a dataclass, dict or tuple of tensors whose first dimension is the slot. Called
        on each rank for its own shards, before the first step and after a skipped one; every other
        step gets the carry of the `StepOut` before it. Checkpoints hold it by shard. Default: None,
        nothing is remembered.
        """
        return None


class NeedsTotals:
    def rounds(self) -> int:
        """Returns how often `statistics` is called in a step; every round finds the sums of those
        before it in `ctx.totals`.

        Called before each step, and gives the same number on all ranks. Default: once.
        """
        return 1

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Returns sums over a micro-batch that the loss needs of the whole batch.

        Called on each rank for each micro-batch of a step, without gradients, before the first
        `forward`. They are summed over micro-batches and ranks, and `forward` finds them in
        `ctx.totals`. Names and shapes must be the same for every batch. Names may differ
        between rounds. Default: none.
        """
        return {}


class LooksAhead:
    def look_ahead(self, micro_batches: Sequence[tuple[Batch, Carry]], alone: bool = False) -> None:
        """Fetches what the forward passes of a step need from other ranks.

        Called on all ranks together, before the passes of each step, with the batch and the carry
        of every micro-batch. With `alone`, for a rehearsal, other ranks do not take part and values
        do not matter. Default: does nothing.
        """


class HasEvaluators:
    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        """Returns fresh evaluators for a set whose batches have the same keys as `row`.

        Called on all ranks, once for each set of an evaluation. They get every batch of the set
        with its prediction; see `utils.measure.evaluator`. Default: none, only the means of
        `predict`.
        """
        return ()


class MovesToDevices(NamedTensors):
    def move_to_devices(self, dist: Dist) -> None:
        """Moves the net to this rank's device, and splits tables that lie split over ranks.

        Called once, on all ranks together, after the net is built. Default: everything goes to
        `dist.device`.
        """
        for table in self.tables().values():
            table.split_over_ranks(dist)
        with dist.agreed():
            self.to(dist.device)

    def movable(self) -> Sequence[nn.Module]:
        """Returns the frozen parts that `move_to_devices` may put on devices of their own.

        Called where memory is planned. Default: none.
        """
        return ()


class SplitsWeights:
    def shardable(self) -> Sequence[nn.Module]:
        """Returns the modules whose weights sync=fsdp may fetch and release one by one.

        Only a module's own forward may use its weights. They are whole within `forward`,
        `statistics`, `predict` and `evaluators`, and nowhere else. Called once, on all ranks.
        Default: none, the net is fetched as a whole.
        """
        return ()


class ReadsPublished:
    def published(self, path: str) -> Mapping[str, Tensor] | None:
        """Returns the tensors of `saved`, read from weights that others have published.

        Called for `init_from`, on rank 0. Returns None if `path` does not hold such weights, which
        is the default.
        """
        return None


class Compiles(NamedTensors):
    def compile_net(self, graphs: bool = False) -> None:
        """Compiles in place, so that names in checkpoints stay as they are.

        Called once on each rank, before the first step, if the run compiles. With `graphs`, CUDA
        replays each pass as one graph. Default: compiles `model` as a whole.
        """
        for layer in self.model.modules():
            if isinstance(layer, Dropout):  # each step has other noise, and would be compiled anew
                layer.mask = torch.compiler.disable(layer.mask)  # type: ignore[method-assign]
        self.model.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
        if graphs:
            keep_what_outlives_a_replay(self)
