"""How much memory a run needs, counted on a net without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contract import Batch, Context, Objective
from utils.plan import footprint

META = torch.device("meta")  # where tensors have shapes and no values


@dataclass(frozen=True)
class Movable:
    """A frozen part of a net that may be on another card of its rank."""

    bytes: int
    work: float  # its share of the operations of a step


@dataclass(frozen=True)
class Needs:
    """Memory in bytes of a rank that computes alone.

    `first` is a pass over one shard, `each` every further shard at once with it.
    """

    trained: int
    gradients: int
    remembered: int  # by optimizers
    averaged: int
    frozen: int  # weights and tables that no gradient reaches
    # the part whose weights are gathered while it computes, where weights are split over ranks
    largest: int
    first: int
    each: int
    parameters: int = 0  # how many numbers train
    movable: Sequence[Movable] = ()  # the frozen parts that may be on other cards of a rank

    def state(self, ranks: int, split: bool) -> int:
        """Bytes that stay from step to step on one of this many ranks; `split`: ranks share what
        trains.
        """
        split_too = self.trained + self.gradients + self.remembered + self.averaged
        if split and ranks > 1:
            # of weights and gradients alike, one part is together while the next is fetched
            split_too = -(-split_too // ranks) + 4 * self.largest
        return self.frozen + split_too

    def passes(self, shards: int) -> int:
        """The peak while this many shards are computed at once."""
        return self.first + (shards - 1) * self.each


def count(
    objective: Objective,
    remembered: Iterable[Tensor],
    averages: bool,
    first_batch: Callable[[range], tuple[Batch, Context]],
    train_on: Callable[[Batch, Context], None],
) -> Needs:
    """Counts what training a net on the meta device needs. `first_batch` returns that of some
    shards, and `train_on` makes a pass that keeps the gradients.
    """
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)  # it stays from one pass to the next
    everything = [*objective.parameters(), *objective.buffers()]
    blocks = [footprint.size(part.parameters()) for part in getattr(objective, "blocks", ())]

    def peak(shards: int) -> int:
        batch, context = first_batch(range(shards))
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        held = [*everything, *gradients, *batch.values()]
        of_pass = footprint.peak(lambda: train_on(batch, context), held)
        return of_pass + footprint.size(batch.values())

    one, two = peak(1), peak(2)
    weights = footprint.size(trained)
    return Needs(
        trained=weights,
        gradients=weights,
        remembered=footprint.size(remembered),
        averaged=weights * averages,
        frozen=footprint.size(everything) - weights,
        largest=weights - sum(blocks) + max(blocks, default=0),
        first=one,
        each=two - one,
        parameters=sum(parameter.numel() for parameter in trained),
        movable=[
            Movable(footprint.size(part.parameters()), work)
            for part, work in getattr(objective, "movable", ())
        ],
    )
