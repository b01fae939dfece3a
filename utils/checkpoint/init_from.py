"""Begin a run with another run's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from utils.checkpoint.reader import load, load_into
from utils.errors import said_of


@said_of("init_from")
def begin_with(module: nn.Module, path: str, tables: Collection[str], say: Callable[[str], None]) -> None:
    """Fill a module. A table of puzzles that has another number of rows here starts with the mean row everywhere."""
    own, adapted = module.state_dict(), load(path, {"model"})[0].get("model", {})
    for name in (f"{table}.weights" for table in tables):
        theirs = adapted.get(name)
        if theirs is not None and theirs.ndim == 2 and len(theirs) not in (0, len(own[name])) and theirs.shape[1:] == own[name].shape[1:]:
            mean = theirs.double().mean(0, keepdim=True).to(theirs.dtype)
            adapted[name] = mean.expand(len(own[name]), -1)
            say(f"init_from={path}: {name} has {len(theirs):,} rows there and {len(own[name]):,} here; every row begins as their mean")
    load_into(module, adapted, path)
