"""Norms of gradients, parameters and updates, for the log."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from optim.sync.base import Sync, norms_of


class Norms:
    """Measures the steps that are logged. The gradient's norm is that before clipping; rows of
    sparse tables are not in it.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._before: list[Tensor] = []
        self._measured: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_update(self, weight: Tensor, norms: Iterable[Tensor]) -> None:
        """Measures gradients, from the norms of their sums and the weight by which these are
        divided, and keeps a copy of the parameters until `after_update`.
        """
        self._measured = {"grad_norm": self._sync.total_norm(norms) / weight}
        self._before = [p.detach().clone() for p in self._sync.parameters.values()]

    @torch.no_grad()
    def after_update(self) -> None:
        """Measures parameters, and how far they have moved."""
        before, self._before = self._before, []
        parameters = [p.detach() for p in self._sync.parameters.values()]
        torch._foreach_sub_(before, parameters)
        self._measured["param_norm"] = self._sync.total_norm(norms_of(parameters))
        self._measured["update_norm"] = self._sync.total_norm(norms_of(before))

    def take(self) -> dict[str, float]:
        """Returns the norms of the last measured step by name, once."""
        taken = {name: float(norm) for name, norm in self._measured.items()}
        self._measured = {}
        return taken
