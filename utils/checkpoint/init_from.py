"""Begins a run with another run's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from utils.checkpoint.reader import load
from utils.checkpoint.registry import Tensors, check_alike
from utils.errors import said_of


class HasWeights(Protocol):
    """The part of an objective that this module needs."""

    def saved(self) -> Tensors: ...

    def tables(self) -> Collection[str]: ...

    def published(self, path: str) -> Tensors | None: ...


@said_of("init_from")
def initial_weights(
    path: str, group: str, objective: HasWeights, say: Callable[[str], None]
) -> Tensors:
    """Reads initial weights from a file, a checkpoint's group or a published folder.

    If a puzzle table has another number of rows here, every row begins as the mean row.
    """
    own, published = objective.saved(), objective.published(path)
    adapted = dict(load(path, [group])[0].get(group, {}) if published is None else published)
    for name in (f"{table}.weights" for table in objective.tables()):
        theirs = adapted.get(name)
        if (
            theirs is not None
            and theirs.ndim == 2
            and len(theirs) not in (0, len(own[name]))
            and theirs.shape[1:] == own[name].shape[1:]
        ):
            mean = theirs.double().mean(0, keepdim=True).to(theirs.dtype)
            adapted[name] = mean.expand(len(own[name]), -1)
            say(
                f"init_from={path}: {name} has {len(theirs):,} rows there and {len(own[name]):,}"
                " here; every row begins as their mean"
            )
    check_alike(own, adapted, f"checkpoint={path}", any_precision=True)
    return adapted
