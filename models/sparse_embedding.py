"""A table too large for dense gradients: a step touches only the rows that it looks up."""

# B ids of a look-up, D width

from __future__ import annotations

import torch
from torch import Tensor, nn


class SparseEmbedding(nn.Module):
    """One row per puzzle. A negative id reads row 0 and trains nothing.

    The table is a buffer, so that dense optimizers do not see it. Each look-up in training makes a
    leaf tensor, whose gradient is that of the rows looked up. The sparse optimizer takes all leaves
    of a step at once, whatever the number of micro-batches.
    """

    weights: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.zeros(rows, width))
        self._looked_up: list[tuple[Tensor, Tensor]] = []

    def forward(self, ids_B: Tensor) -> Tensor:
        rows_BD = self.weights[ids_B.clamp_min(0).long()]
        # a leaf for this look-up alone: the gradient has as many rows as ids, and not as the table
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
