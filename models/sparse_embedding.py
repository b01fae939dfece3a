"""A table too large for dense gradients: a step touches only the rows that it looks up."""

# B ids of a look-up, N ids of a step, R ranks, D width

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checkpoint.format import RowRange
from utils.ranks.distributed import Dist


class SparseEmbedding(nn.Module):
    """One row per puzzle. A negative id reads row 0 and trains nothing.

    The table is a buffer, so that dense optimizers do not see it. Each look-up in training makes a
    leaf tensor, whose gradient is that of the rows looked up. The sparse optimizer takes all leaves
    of a step at once, whatever the number of micro-batches.
    """

    split = False  # whether each rank holds only a block of the rows
    weights: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.zeros(rows, width))
        self._looked_up: list[tuple[Tensor, Tensor]] = []

    def forward(self, ids_B: Tensor) -> Tensor:
        rows_BD = self._read(ids_B.clamp_min(0).long())
        if self.training and torch.is_grad_enabled():
            rows_BD = rows_BD.detach().requires_grad_()
            self._looked_up.append((ids_B.detach(), rows_BD))
        return rows_BD

    def row_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns (ids, row gradients) of every look-up since the last `take_row_grads`."""
        return [
            (ids, rows.grad if rows.grad is not None else torch.zeros_like(rows))
            for ids, rows in self._looked_up
        ]

    def take_row_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns what `row_grads` returns, and drops it to begin the next step."""
        looked_up = self.row_grads()
        self._looked_up = []
        return looked_up

    def split_over_ranks(self, dist: Dist) -> None:
        """Splits the table over ranks. Called once, on all ranks together. Default: keeps the whole
        table on every rank.
        """

    def look_ahead(self, ids: Sequence[Tensor], alone: bool = False) -> None:
        """Fetches the rows of a step's look-ups, given in their order, from the ranks that own
        them. Called on all ranks together, unless `alone`. Default: does nothing.
        """

    def local_rows(self, ids_N: Tensor) -> Tensor:
        """Returns each row's number in `weights`, or -1 if another rank owns the row."""
        return ids_N

    def _read(self, ids_B: Tensor) -> Tensor:
        return self.weights[ids_B]


class SplitEmbedding(SparseEmbedding):
    """A table of which every rank holds one block of rows, and fetches the other rows it needs.

    Every rank sends its ids to all ranks and gets one row for each id from each of them, of which
    it keeps the owner's. So all messages have the same size, and no host waits for its device to
    learn how many rows an owner has. The messages are small beside those of dense gradients.
    """

    split = True

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.rows = rows
        self._dist = Dist()
        self._capacity = 0  # the most rows that any rank looks up in a step
        self._ahead: list[Tensor] = []

    def split_over_ranks(self, dist: Dist) -> None:
        """Keeps this rank's block of rank 0's table. All blocks have the same length: the last one
        is padded with zeros.

        Called once, on all ranks together, and before anything refers to `weights`.
        """
        table, self._dist = self.weights, dist
        size = -(-self.rows // dist.world_size)
        for rank in range(dist.world_size):
            block = torch.zeros(size, table.shape[1], dtype=table.dtype, device=dist.device)
            there = table[rank * size : (rank + 1) * size]
            block[: len(there)] = there
            dist.broadcast(block)
            if rank == dist.rank:
                self.weights = block

    def owned_rows(self) -> RowRange:
        """Returns which rows this rank holds, without padding."""
        first = min(self._dist.rank * len(self.weights), self.rows)
        return RowRange(first, min(first + len(self.weights), self.rows), self.rows)

    def look_ahead(self, ids: Sequence[Tensor], alone: bool = False) -> None:
        """Fetches the rows of a step's look-ups; with `alone`, zeros take their place."""
        ids_N = torch.cat([part.flatten() for part in ids]).clamp_min(0).long()
        if alone:
            rows_ND = self.weights.new_zeros(len(ids_N), self.weights.shape[1])
        else:
            if not self._capacity:
                own = torch.tensor([len(ids_N)], device=self.weights.device)
                self._capacity = int(max(self._dist.all_gather(own)))
            rows_ND = self._fetch(ids_N, self._capacity)
        self._ahead = list(rows_ND.split([part.numel() for part in ids]))

    def take_row_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Also drops rows that were fetched and not looked up."""
        self._ahead = []
        return super().take_row_grads()

    def local_rows(self, ids_N: Tensor) -> Tensor:
        rows_N = ids_N - self._dist.rank * len(self.weights)
        owned_N = (ids_N >= 0) & (rows_N >= 0) & (rows_N < len(self.weights))
        return torch.where(owned_N, rows_N, -1)

    def _read(self, ids_B: Tensor) -> Tensor:
        if not self.training:
            # batches of an evaluation have the same size on all ranks
            return self._fetch(ids_B, len(ids_B))
        assert self._ahead, "look_ahead comes before the passes of a step"
        return self._ahead.pop(0)

    def _fetch(self, ids_N: Tensor, capacity: int) -> Tensor:
        wanted_N = F.pad(ids_N, (0, capacity - len(ids_N)))
        size, first = len(self.weights), self._dist.rank * len(self.weights)
        asked_RN = torch.stack(self._dist.all_gather(wanted_N))
        # an id of another owner gets any row: its reader ignores the answer
        answers_RND = self.weights[(asked_RN - first).clamp(0, size - 1)]
        got_RND = self._dist.all_to_all(answers_RND.flatten(0, 1)).view_as(answers_RND)
        return got_RND[wanted_N // size, torch.arange(capacity, device=wanted_N.device)][
            : len(ids_N)
        ]
