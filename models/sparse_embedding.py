"""A table too large for dense gradients: only the rows looked up in a step are touched."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        rows_BD = self.weights[ids_B.clamp_min(0).long()]
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
