"""Begin a run with another run's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

from utils.checkpoint.reader import load
from utils.checkpoint.registry import Tensors, check_alike
from utils.errors import said_of


@said_of("init_from")
def begin_with(path: str, group: str, own: Tensors, tables: Collection[str], say: Callable[[str], None]) -> Tensors:
    """The weights in a file or a checkpoint's group, to be taken for our own.

    A table of puzzles that has another number of rows here starts with the mean row everywhere.
    """
    adapted = load(path, [group])[0].get(group, {})
    for name in (f"{table}.weights" for table in tables):
        theirs = adapted.get(name)
        if theirs is not None and theirs.ndim == 2 and len(theirs) not in (0, len(own[name])) and theirs.shape[1:] == own[name].shape[1:]:
            mean = theirs.double().mean(0, keepdim=True).to(theirs.dtype)
            adapted[name] = mean.expand(len(own[name]), -1)
            say(f"init_from={path}: {name} has {len(theirs):,} rows there and {len(own[name]):,} here; every row begins as their mean")
    check_alike(own, adapted, f"checkpoint={path}", any_precision=True)
    return adapted
