"""Sign-SGD on tables of which a step touches few rows: the cost follows the batch, not the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from utils.errors import ConfigError
from utils.ranks.distributed import Dist

# N rows that a step may look up (the capacities of all ranks), C capacity, W width
# name, weights, numbers of rows, and whether each of them changes
UpdateHook = Callable[[str, Tensor, Tensor, Tensor], None]


class Table(Protocol):
    """The interface of a table: its rows or a block of them, and the (ids, row gradients) of the
    look-ups since the last `take`.
    """

    weights: Tensor

    def local_rows(self, ids_N: Tensor) -> Tensor: ...
    def peek(self) -> list[tuple[Tensor, Tensor]]: ...
    def take(self) -> list[tuple[Tensor, Tensor]]: ...


class SparseSignSGD(torch.optim.Optimizer):
    """Gathers the step's rows from all ranks, sums duplicates once, decays and steps every row that
    was looked up.

    Row order is rank by rank and, within a rank, micro-batch by micro-batch: ranks own contiguous
    shards, so it is the order of the global batch at any world size, and sums added in that order
    come out the same.
    """

    def __init__(
        self, tables: Mapping[str, Table], capacity: int, dist: Dist, lr: float, weight_decay: float
    ) -> None:
        if lr < 0:
            raise ConfigError(f"optim.sparse.lr={lr}: a learning rate is not negative; try 1e-2")
        if weight_decay < 0:
            raise ConfigError(
                f"optim.sparse.weight_decay={weight_decay}: a decay is not negative; try 0.1"
            )
        self.tables = dict(tables)
        self.capacity = capacity
        self.dist = dist
        self.before_update: list[UpdateHook] = []
        super().__init__(
            [table.weights for table in self.tables.values()],
            {"lr": lr, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every rank must call it, even one that looked nothing up: each table is one
        collective.
        """
        assert closure is None, "row gradients are taken once, there is nothing to evaluate again"
        group = self.param_groups[0]
        for name, table in self.tables.items():
            ids_N, grads_NW = self._gathered(name, table)
            rows_N, sums_NW = sum_duplicates(table.local_rows(ids_N), grads_NW)
            self._update(name, table.weights, rows_N, sums_NW, group["lr"], group["weight_decay"])

    def local_grads(self) -> list[Tensor]:
        """This rank's row gradients of the step so far, to be checked for values that are not
        finite.
        """
        return [grads for table in self.tables.values() for _, grads in table.peek()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the look-ups, as after a refused step."""
        for table in self.tables.values():
            table.take()

    def _update(
        self,
        name: str,
        weights: Tensor,
        ids_N: Tensor,
        sums_NW: Tensor,
        lr: float,
        weight_decay: float,
    ) -> None:
        # where nobody looked anything up, row 0 is written as it was
        some, ids_N = ids_N[-1:] >= 0, ids_N.clamp_min(0)
        for hook in self.before_update:
            hook(name, weights, ids_N, some)
        rows_NW = weights.index_select(0, ids_N)
        # sign() discards scale, so neither the number of ranks nor the loss weight has to be
        # divided out
        moved_NW = (rows_NW * (1 - lr * weight_decay)).add_(
            sums_NW.sign_().to(weights.dtype), alpha=-lr
        )
        # copies whole rows, some of them several times; `weights[ids]` is several times slower on a
        # large table
        weights.index_copy_(0, ids_N, torch.where(some[:, None], moved_NW, rows_NW))

    def _gathered(self, name: str, table: Table) -> tuple[Tensor, Tensor]:
        """All ranks' ids and row gradients, by one collective; an id below 0 stands where no row
        was looked up.

        A rank sends as many rows as it has room for, each one's id and the bits of its gradient:
        nobody need ask the device how many there are. Everything travels as integers, so that no
        NaN's bits are rewritten on the way.
        """
        looked_up = table.take()
        width = table.weights.shape[1]
        counts = [ids.numel() for ids, _ in looked_up]
        if sum(counts) > self.capacity:
            raise RuntimeError(
                f"{sum(counts)} rows of {name} were looked up in one step, but the optimizer has"
                f" room for {self.capacity}"
            )
        payload = torch.zeros(
            self.capacity, 1 + width, dtype=torch.int32, device=table.weights.device
        )
        payload[sum(counts) :, 0] = -1
        places = payload[: sum(counts)].split(counts) if counts else ()
        for place, (ids, grads) in zip(places, looked_up, strict=True):
            place[:, 0] = ids.flatten()
            place[:, 1:] = grads.reshape(-1, width).float().view(torch.int32)
        rows = torch.cat(self.dist.all_gather(payload))
        return rows[:, 0].long(), rows[:, 1:].contiguous().view(torch.float32)


def sum_duplicates(ids_N: Tensor, grads_NW: Tensor) -> tuple[Tensor, Tensor]:
    """The ids, ascending, each as often as it came, and with each the sum of its gradients, always
    added in row order.

    The number of rows stays: how many ids differ, the device alone knows. Rows with an id below 0
    become further ones of the last id.

    A stable sort brings the rows of an id together in their order and the segments are added one by
    one. Scattered adds (`index_add_`) would meet in any order on CUDA, and replicas whose sums
    differ in the last bit can differ in sign.
    """
    ids_N, order_N = torch.sort(ids_N, stable=True)
    first_N = torch.searchsorted(ids_N, ids_N)  # the first row of the same id
    # whole numbers: in any order the same
    lengths_N = torch.zeros_like(first_N).scatter_add_(0, first_N, torch.ones_like(first_N))
    sums_NW = torch.segment_reduce(
        grads_NW.index_select(0, order_N), "sum", lengths=lengths_N, unsafe=True
    )
    chosen_N = torch.where(ids_N < 0, first_N[-1:], first_N)
    return ids_N.index_select(0, chosen_N), sums_NW.index_select(0, chosen_N)
