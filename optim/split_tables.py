"""Which rows of parameters and of tables a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

from optim.sync.base import Sync
from utils.checkpoint.slices import Rows


class Split(Protocol):
    """A table of which every rank holds a block of rows."""

    def block(self) -> Rows: ...


class WithTables:
    """Makes checkpoints hold parameters as `sync` says, and tables and their averages whole, in the
    same names and shapes.
    """

    def __init__(self, sync: Sync, tables: Mapping[str, object]) -> None:
        self._sync = sync
        self._tables = {name: table for name, table in tables.items() if _is_split(table)}

    def rows(self, name: str, ndim: int) -> Rows | None:
        """Weights have a table's name, averages contain it."""
        table = self._tables.get(name.rpartition("/")[2].removesuffix(".weights"))
        return self._sync.rows(name, ndim) if table is None else table.block()


def _is_split(table: object) -> TypeGuard[Split]:
    return hasattr(table, "block")
