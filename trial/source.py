"""Tries the data of a new run: one batch, twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trial import generators
from utils.errors import ConfigError, full_name
from utils.noise import seeded


def try_source(source: Any, shards: int, shard: int, device: torch.device) -> None:
    """Raises ConfigError for the first law that the source breaks in one of this rank's shards.

    Called on every rank of a new run, before ranks compare their data: the message of a law names
    the remedy, that of a difference does not.
    """
    where = f"{full_name(source)}.train_batch"
    batches, drawn = [], []
    for state in range(2):  # of the global generators, which a batch may seed before it draws
        with seeded(state):
            before = generators.states(device)
            batches.append(source.train_batch(0, shard))
            drawn.append(generators.moved(before, device))
    for name in drawn[0] | drawn[1]:
        if drawn[0].get(name) != drawn[1].get(name):
            raise generators.draws(where, name, "np.random.default_rng([seed, step, shard])")
    one, two = batches
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two or not _same_bits(one[name], two[name]):
            raise ConfigError(
                f"{where}: {name} of step 0, shard {shard} differs between two calls; let it depend"
                " on the seed, the step and the shard alone"
            )
    rows = source.length.examples_per_update // shards
    for name, array in one.items():
        if len(array) != rows:
            raise ConfigError(
                f"{where}: {name} of a shard has {len(array)} rows, but a batch of {rows * shards}"
                f" in shards={shards} has {rows} in each; return the rows of one shard"
            )


def _same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
