"""Sign-SGD on tables of which a step touches few rows: the cost follows the batch, not the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from utils.errors import ConfigError
from utils.ranks.distributed import Dist

# N looked-up rows of a step (all micro-batches, all ranks), U different rows among them, C capacity, W width
UpdateHook = Callable[[str, Tensor, Tensor], None]


class Table(Protocol):
    """What is asked of a table: its rows, and the (ids, row gradients) of the look-ups since the last `take`."""

    weights: Tensor

    def peek(self) -> list[tuple[Tensor, Tensor]]: ...
    def take(self) -> list[tuple[Tensor, Tensor]]: ...


class SparseSignSGD(torch.optim.Optimizer):
    """Gathers the step's rows from all ranks, sums duplicates once, decays and steps every row that was looked up.

    Row order is rank by rank and, within a rank, micro-batch by micro-batch: ranks own contiguous shards, so it is
    the order of the global batch at any world size, and sums added in that order come out the same.
    """

    def __init__(self, tables: Mapping[str, Table], capacity: int, dist: Dist, lr: float, weight_decay: float) -> None:
        if lr < 0:
            raise ConfigError(f"optim.sparse.lr={lr}: a learning rate is not negative; try 1e-2")
        if weight_decay < 0:
            raise ConfigError(f"optim.sparse.weight_decay={weight_decay}: a decay is not negative; try 0.1")
        self.tables = dict(tables)
        self.capacity = capacity
        self.dist = dist
        self.before_update: list[UpdateHook] = []
        super().__init__([table.weights for table in self.tables.values()], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every rank must call it, even one that looked nothing up: each table is one collective."""
        assert closure is None, "row gradients are taken once, there is nothing to evaluate again"
        group = self.param_groups[0]
        for name, table in self.tables.items():
            ids_N, grads_NW = self._gathered(name, table)
            ids_U, sums_UW = sum_duplicates(ids_N, grads_NW)
            if len(ids_U):
                self._update(name, table.weights, ids_U, sums_UW, group["lr"], group["weight_decay"])

    def local_grads(self) -> list[Tensor]:
        """This rank's row gradients of the step so far, to be checked for values that are not finite."""
        return [grads for table in self.tables.values() for _, grads in table.peek()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the look-ups, as after a refused step."""
        for table in self.tables.values():
            table.take()

    def _update(self, name: str, weights: Tensor, ids_U: Tensor, sums_UW: Tensor, lr: float, weight_decay: float) -> None:
        for hook in self.before_update:
            hook(name, weights, ids_U)
        # sign() discards scale, so neither the number of ranks nor the loss weight has to be divided out
        rows_UW = weights.index_select(0, ids_U).mul_(1 - lr * weight_decay).add_(sums_UW.sign_().to(weights.dtype), alpha=-lr)
        weights.index_copy_(0, ids_U, rows_UW)  # copies whole rows; `weights[ids]` is several times slower on a large table

    def _gathered(self, name: str, table: Table) -> tuple[Tensor, Tensor]:
        """All ranks' valid ids and row gradients, by one collective.

        A rank sends a header row with its number of rows, then each row's id and the bits of its gradient, padded to
        the capacity. Everything travels as integers, so that no NaN's bits are rewritten on the way.
        """
        looked_up = table.take()
        width = table.weights.shape[1]
        counts = [ids.numel() for ids, _ in looked_up]
        payload = torch.zeros(1 + self.capacity, 1 + width, dtype=torch.int32, device=table.weights.device)
        payload[0, 0] = sum(counts)
        if sum(counts) <= self.capacity:
            places = payload[1 : 1 + sum(counts)].split(counts) if counts else ()
            for place, (ids, grads) in zip(places, looked_up, strict=True):
                place[:, 0] = ids.flatten()
                place[:, 1:] = grads.reshape(-1, width).float().view(torch.int32)
        parts = self.dist.all_gather(payload)
        sent = torch.stack([part[0, 0] for part in parts]).tolist()
        # Checked after the exchange: a rank that raised alone would leave the others waiting.
        for rank, count in enumerate(sent):
            if count > self.capacity:
                raise RuntimeError(
                    f"rank {rank} looked up {count} rows of {name} in one step, but the sparse optimizer has room for {self.capacity}"
                )
        rows = torch.cat([part[1 : 1 + count] for part, count in zip(parts, sent, strict=True)])
        rows = rows[rows[:, 0] >= 0]
        return rows[:, 0].long(), rows[:, 1:].contiguous().view(torch.float32)


def sum_duplicates(ids_N: Tensor, grads_NW: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids, ascending, and the sum of each one's gradients, always added in row order.

    A stable sort brings the rows of an id together in their order and the segments are added one by one. Scattered
    adds (`index_add_`) would meet in any order on CUDA, and replicas whose sums differ in the last bit can differ in sign.
    """
    ids_N, order_N = torch.sort(ids_N, stable=True)
    ids_U, counts_U = torch.unique_consecutive(ids_N, return_counts=True)
    if not len(ids_U):
        return ids_U, grads_NW
    return ids_U, torch.segment_reduce(grads_NW[order_N], "sum", lengths=counts_U, unsafe=True)
