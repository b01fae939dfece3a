"""Makes a run's source, checks what it returns, and recognises its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from contract import Arrays, RunSettings, Source
from data.files import content_hash
from utils.checkpoint.registry import EVALUATED
from utils.command.instantiate import make
from utils.errors import ConfigError, full_name, kind_of
from utils.noise import seeded

COMPARED_ROWS = 8  # of each evaluation set, by which a run recognises it, with its length


def fingerprints_of(source: Source, shard: int | None) -> dict[str, str]:
    """Returns texts by which a run recognises its data, one for each part: a hash of the first
    step's first shard, and the length of each evaluation set with a hash of its first rows.

    They must be the same on all ranks, and after a resume. `shard` is one of this rank's; None for
    a run that does not train.
    """
    parts = {"the dataset": source.spec.fingerprint}
    if shard is not None:
        # only its owner may begin to read a stream
        is_stream = hasattr(source, "cursor")
        batch = check_batch(
            f"{full_name(source)}.train_batch", source.train_batch(0, shard if is_stream else 0)
        )
        if not is_stream:
            parts["the first training batch"] = content_hash(batch)
    # the order of the sets counts, too: ranks go through them together
    for number, (name, examples) in enumerate(source.eval_sets().items()):
        where, rows = f"{full_name(source)}.eval_sets: {name}", dict[str, np.ndarray]()
        if not hasattr(examples, "read"):
            raise ConfigError(f"{where}: is {kind_of(examples)}; give contract.Examples")
        if count := min(COMPARED_ROWS, len(examples)):
            rows = check_batch(where, examples.read(np.arange(count)), count)
        parts[EVALUATED + name] = f"{number} {len(examples)} {content_hash(rows)}"
    return parts


def check_batch(where: str, batch: Any, rows: int | None = None) -> Arrays:
    """Returns a batch as arrays. Raises ConfigError unless it is a dictionary of numbers, with one
    row for each example.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(
            f"{where}: returns {kind_of(batch)}; return a dict of arrays, such as inputs and labels"
        )
    # whatever NumPy can turn into numbers is welcome: lists, tensors, arrays
    arrays: Arrays = {}
    for name, value in batch.items():
        try:
            arrays[name] = array = np.asarray(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{where}: {name} cannot become an array; return numbers, in rows padded to one"
                " length"
            ) from None
        # text and objects have no place in a tensor
        if array.dtype.kind not in "biufc":
            what = array.dtype.type.__name__.strip("_")
            raise ConfigError(
                f"{where}: {name} holds {what}, not numbers; encode it, or leave it out"
            )
        if not array.ndim:
            raise ConfigError(f"{where}: {name} is one number; give every example its own row")
        # the first array says how many examples there are, unless the caller does
        rows = len(array) if rows is None else rows
        if len(array) != rows:
            raise ConfigError(
                f"{where}: {name} has {len(array)} rows, not {rows}; give every example one row"
            )
    return arrays


def settings_of(config: Mapping[str, Any]) -> RunSettings:
    """Picks them from a run's configuration; keys that are missing or null get the default."""
    given = {each.name: config.get(each.name) for each in fields(RunSettings)}
    if given["eval_only"]:  # nothing is trained, so any length will do
        given |= {"epochs": None, "eval_interval": None, "max_steps": 1}
    return RunSettings(**{name: value for name, value in given.items() if value is not None})


def source_of(config: Mapping[str, Any]) -> Source:
    run = settings_of(config)
    with seeded(run.seed):  # a split that code outside this repository draws
        source: Source = make(config.get("data", {}), "data", run)
    return source
