"""Between tables of which every rank holds a block of rows, and checkpoints, which hold them
whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from optim.replicas import check_same
from optim.sync.base import Sync
from utils.ranks.distributed import Dist


class Split(Protocol):
    """What is asked of such a table."""

    rows: int

    def share_of(self, whole: Tensor) -> Tensor: ...


class WithTables:
    """What checkpoints hold of parameters as `sync` says, and of tables and their averages whole,
    in the same names and shapes.
    """

    def __init__(self, sync: Sync, tables: Mapping[str, object], dist: Dist) -> None:
        self._sync, self._dist = sync, dist
        self._tables = {name: table for name, table in tables.items() if _is_split(table)}

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole on rank 0, fetched one by one."""
        whole = self._sync.full(self._others(tensors))
        for name, tensor in tensors.items():
            if (table := self._owner(name)) is not None and (
                parts := self._dist.gather(tensor.detach())
            ) is not None:
                whole[name] = torch.cat(parts)[: table.rows]
        return whole

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the shapes that they have whole."""
        whole = self._sync.like(self._others(tensors))
        for name, tensor in tensors.items():
            if (table := self._owner(name)) is not None:
                whole[name] = torch.empty(
                    table.rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta"
                )
        return whole

    def split(self, tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
        """This rank's blocks, after a look whether all ranks have read the same."""
        shares = self._sync.split(self._others(tensors), part)
        owned = {name: table for name in tensors if (table := self._owner(name)) is not None}
        check_same({f"{part}/{name}": tensors[name] for name in owned}, self._dist)
        return shares | {
            name: table.share_of(tensors[name]).to(self._dist.device)
            for name, table in owned.items()
        }

    def _others(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if self._owner(name) is None}

    def _owner(self, name: str) -> Split | None:
        """The table whose rows these belong to: weights are named by it, averages contain its
        name.
        """
        return self._tables.get(name.rpartition("/")[2].removesuffix(".weights"))


def _is_split(table: object) -> TypeGuard[Split]:
    return hasattr(table, "share_of")
