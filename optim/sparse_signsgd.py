"""Sign-SGD for tables of which a step touches few rows: its cost grows with the batch, not with
the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from utils.ranks.distributed import Dist

# N look-ups that a step may make (all ranks' capacities together), W width.


class Table(Protocol):
    """The part of a table that this optimizer uses; see `models/sparse_embedding.py`."""

    weights: Tensor

    def row_grads(self) -> list[tuple[Tensor, Tensor]]: ...
    def take_row_grads(self) -> list[tuple[Tensor, Tensor]]: ...


class SparseSignSGD(torch.optim.Optimizer):
    """Gathers the step's row gradients from all ranks, sums those of the same row, then decays and
    steps every row that was looked up.

    Gradients are gathered rank by rank and, within a rank, micro-batch by micro-batch. As ranks own
    contiguous shards, this is the order of the global batch at any world size, so the sums have the
    same bits.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        capacity: int,
        dist: Dist,
        lr: NonNegativeFloat,
        weight_decay: NonNegativeFloat,
    ) -> None:
        self.tables = dict(tables)
        self.capacity = capacity
        self.dist = dist
        super().__init__(
            [table.weights for table in self.tables.values()],
            {"lr": lr, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Called on every rank, even on one that looked nothing up: each table takes one
        collective.
        """
        assert closure is None, "row gradients are taken once; a closure cannot be evaluated again"
        group = self.param_groups[0]
        for name, table in self.tables.items():
            ids_N, grads_NW = self._gather(name, table)
            rows_N, sums_NW = sum_duplicates(ids_N, grads_NW)
            self._update(table.weights, rows_N, sums_NW, group["lr"], group["weight_decay"])

    def local_grads(self) -> list[Tensor]:
        """Returns this rank's row gradients of the step, for the check that they are finite."""
        return [grads for table in self.tables.values() for _, grads in table.row_grads()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the look-ups of a step that is skipped."""
        for table in self.tables.values():
            table.take_row_grads()

    def _update(
        self, weights: Tensor, rows_N: Tensor, sums_NW: Tensor, lr: float, weight_decay: float
    ) -> None:
        # if no rank looked anything up, row 0 is rewritten unchanged
        any_change, rows_N = rows_N[-1:] >= 0, rows_N.clamp_min(0)
        before_NW = weights.index_select(0, rows_N)
        # sign() discards scale, so neither the number of ranks nor the loss weight has to be
        # divided out
        moved_NW = (before_NW * (1 - lr * weight_decay)).add_(
            sums_NW.sign_().to(weights.dtype), alpha=-lr
        )
        # numbers may repeat, with equal values; `weights[rows_N] = …` is several times slower
        weights.index_copy_(0, rows_N, torch.where(any_change[:, None], moved_NW, before_NW))

    def _gather(self, name: str, table: Table) -> tuple[Tensor, Tensor]:
        """Gathers all ranks' ids and row gradients by one collective; unused rows have id -1.

        Every rank sends as many rows as its capacity, so no host asks its device for their number.
        Gradients travel as integers, because a backend may change the bits of a NaN.
        """
        looked_up = table.take_row_grads()
        width = table.weights.shape[1]
        counts = [ids.numel() for ids, _ in looked_up]
        if sum(counts) > self.capacity:
            raise RuntimeError(
                f"{sum(counts)} rows of {name} were looked up in one step, but the optimizer has"
                f" room for {self.capacity}"
            )
        # the id in the first column, the gradient in the others, so that one message has both
        payload = torch.zeros(
            self.capacity, 1 + width, dtype=torch.int32, device=table.weights.device
        )
        payload[sum(counts) :, 0] = -1
        blocks = payload[: sum(counts)].split(counts) if counts else ()
        for block, (ids, grads) in zip(blocks, looked_up, strict=True):
            block[:, 0] = ids.flatten()
            block[:, 1:] = grads.reshape(-1, width).float().view(torch.int32)
        rows = torch.cat(self.dist.all_gather(payload))
        return rows[:, 0].long(), rows[:, 1:].contiguous().view(torch.float32)


def sum_duplicates(ids_N: Tensor, grads_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ids in ascending order, duplicates included, and for each the sum of all
    gradients with its id, added in row order.

    The number of rows stays the same, because only the device knows how many ids differ. Rows with
    a negative id become duplicates of the last id.

    A stable sort brings the rows of an id together, and each segment is added in order.
    `index_add_` would add in any order on CUDA, and two ranks whose sums differ in the last bit can
    differ in sign.
    """
    ids_N, order_N = torch.sort(ids_N, stable=True)
    first_N = torch.searchsorted(ids_N, ids_N)  # the first row of the same id
    # integers: the sum is the same in any order
    lengths_N = torch.zeros_like(first_N).scatter_add_(0, first_N, torch.ones_like(first_N))
    sums_NW = torch.segment_reduce(
        grads_NW.index_select(0, order_N), "sum", lengths=lengths_N, unsafe=True
    )
    chosen_N = torch.where(ids_N < 0, first_N[-1:], first_N)
    return ids_N.index_select(0, chosen_N), sums_NW.index_select(0, chosen_N)
