"""A table too large for dense gradients: only the rows looked up in a step are touched."""

# B ids of a look-up, N ids of a step, R ranks, D width

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.ranks.distributed import Dist


class SparseEmbedding(nn.Module):
    """One row per puzzle. A row id below 0 reads row 0 and is never trained.

    The table is a buffer: the dense optimizers must not see it. Each look-up in training makes a leaf whose
    gradient is that look-up's row gradients; the sparse optimizer takes all leaves of a step at once, so
    several micro-batches lose nothing.
    """

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

    def peek(self) -> list[tuple[Tensor, Tensor]]:
        """(ids, row gradients) of every look-up since the last `take`."""
        return [(ids, rows.grad if rows.grad is not None else torch.zeros_like(rows)) for ids, rows in self._looked_up]

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Like `peek`, and forgets them: the next step begins."""
        looked_up = self.peek()
        self._looked_up = []
        return looked_up

    def places(self, ids_N: Tensor) -> Tensor:
        """Where in `weights` these rows stand; below 0 what stands there not."""
        return ids_N

    def _read(self, ids_B: Tensor) -> Tensor:
        return self.weights[ids_B]


class ShardedEmbedding(SparseEmbedding):
    """A table of which every rank holds one block of rows; what a step or an evaluated batch needs comes from the owners.

    A rank asks each owner for as many rows as any rank may need, and takes what it asked for: messages have one size, and
    nobody waits for the device to learn who owns how many. That is little beside what dense gradients cost.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.rows = rows
        self._dist = Dist()
        self._room = 0  # most rows that a rank needs in a step
        self._ahead: list[Tensor] = []

    def share_out(self, dist: Dist) -> None:
        """Once, on all ranks together and before anybody takes hold of `weights`: keep a block of what rank 0 has."""
        whole, self._dist = self.weights, dist
        for rank in range(dist.world_size):
            block = self.share_of(whole, rank).to(dist.device)
            dist.broadcast(block)
            if rank == dist.rank:
                self.weights = block

    def share_of(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """The block that a rank holds, or this one, of something with the table's rows: all equally long, the last filled up with zeros."""
        size, rank = -(-self.rows // self._dist.world_size), self._dist.rank if rank is None else rank
        block = torch.zeros(size, *whole.shape[1:], dtype=whole.dtype)
        there = whole[rank * size : (rank + 1) * size]
        block[: len(there)] = there
        return block

    def look_ahead(self, ids: Sequence[Tensor], alone: bool = False) -> None:
        """Once a step, on all ranks together: fetch the rows of the look-ups that follow, which come in this order.

        `alone`: no rank is asked, and numbers do not matter.
        """
        ids_N = torch.cat([part.flatten() for part in ids]).clamp_min(0).long()
        if alone:
            rows_ND = self.weights.new_zeros(len(ids_N), self.weights.shape[1])
        else:
            self._room = self._room or int(max(self._dist.all_gather(torch.tensor([len(ids_N)], device=self.weights.device))))
            rows_ND = self._fetch(ids_N, self._room)
        self._ahead = list(rows_ND.split([part.numel() for part in ids]))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """As of any table, and what was fetched and not looked up is forgotten too."""
        self._ahead = []
        return super().take()

    def places(self, ids_N: Tensor) -> Tensor:
        """Where in this rank's block these rows stand; below 0 those of other ranks."""
        places_N = ids_N - self._dist.rank * len(self.weights)
        return torch.where((ids_N >= 0) & (places_N >= 0) & (places_N < len(self.weights)), places_N, -1)

    def _read(self, ids_B: Tensor) -> Tensor:
        if not self.training:
            return self._fetch(ids_B, len(ids_B))  # evaluated batches are of one size on all ranks
        assert self._ahead, "a step looks ahead before its passes"
        return self._ahead.pop(0)

    def _fetch(self, ids_N: Tensor, room: int) -> Tensor:
        wanted_N = F.pad(ids_N, (0, room - len(ids_N)))
        size, first = len(self.weights), self._dist.rank * len(self.weights)
        asked_RN = torch.stack(self._dist.all_gather(wanted_N))
        answers_RND = self.weights[(asked_RN - first).clamp(0, size - 1)]  # of a row that stands elsewhere, whatever is here
        got_RND = self._dist.all_to_all(answers_RND.flatten(0, 1)).view_as(answers_RND)
        return got_RND[wanted_N // size, torch.arange(room, device=wanted_N.device)][: len(ids_N)]
