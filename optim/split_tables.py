"""Tells which rows of parameters and tables this rank holds, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

from optim.sync.base import Sync
from utils.checkpoint.format import RowRange


class SplitTable(Protocol):
    """A table of which every rank holds a block of rows."""

    def owned_rows(self) -> RowRange: ...


class RowRangesOfTables:
    """Asks split tables for the rows of tables and their averages, and `sync` for all others.

    So checkpoints hold whole tensors, whatever is split in the run that writes them.
    """

    def __init__(self, sync: Sync, tables: Mapping[str, object]) -> None:
        self._sync = sync
        self._tables = {name: table for name, table in tables.items() if _is_split(table)}

    def row_range(self, name: str, ndim: int) -> RowRange | None:
        # a table's weights are saved as `name.weights`, its averages as `rows/name`
        table = self._tables.get(name.rpartition("/")[2].removesuffix(".weights"))
        return self._sync.row_range(name, ndim) if table is None else table.owned_rows()


def _is_split(table: object) -> TypeGuard[SplitTable]:
    return hasattr(table, "owned_rows")
