"""Initialises components to inputs: V's columns are the directions of inputs of their matrix, first
of some that differ, then of any.
"""

# C components of a matrix, D width of its input, R inputs to choose from

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from contract import Noise
from models.decomposition.components import Components
from models.layers import widen
from utils.ranks.distributed import Dist

POOL = 8  # there are this many times as many inputs to choose from as components
LIKE = 0.5  # an input is different below this cosine; an input with three has 0.58
DECIMALS = 5  # of cosines: the choice must not depend on rounding


@torch.no_grad()
def start_at_inputs(
    model: Components, by_shard: Sequence[Sequence[Tensor]], noise: Noise, dist: Dist
) -> None:
    """Replaces the columns of V by directions of inputs of its matrix.

    `by_shard` holds the inputs of every matrix for each shard of `noise`. Every shard offers the
    same number of inputs, drawn among those that are not zero. If there are fewer inputs than
    columns, the last columns stay as they are. All ranks call this together, and the columns are
    the same at any number of ranks.
    """
    shards = int(dist.sums([len(noise.shards)])[0])
    for number, name in enumerate(model.names):
        if number in model.ties:
            continue
        V_DC = model.factors(number)[0]
        # every shard offers its share of a pool that is larger than the number of columns
        most = -(-POOL * V_DC.shape[1] // shards)
        # one rank fills each shard's rows, so that the sum over ranks gathers them
        offered = V_DC.new_zeros(shards, most, len(V_DC))
        for shard, inputs in zip(noise.shards, by_shard, strict=True):
            drawn = Noise(noise.seed, noise.step, [shard], noise.device)
            rows = _drawn(inputs[number], most, drawn, f"first inputs of {name}")
            offered[shard, : len(rows)] = rows.to(V_DC.dtype)
        dist.all_reduce(offered)
        pool_RD = offered.transpose(0, 1).flatten(0, 1)  # in turn from all shards
        pool_RD = pool_RD[pool_RD.any(1)]
        chosen = _different(pool_RD, V_DC)
        V_DC[:, : len(chosen)] = chosen.t()


def _drawn(inputs: Tensor, most: int, noise: Noise, stream: str) -> Tensor:
    """Returns up to `most` inputs of a shard, scaled to length 1."""
    rows = widen(inputs.flatten(0, -2))
    # in random order, so that the first ones are a fair sample
    rows = rows[noise.uniform(stream, (len(rows),)).argsort(stable=True)]
    return F.normalize(rows[rows.any(1)][:most], dim=1)


def _different(pool_RD: Tensor, V_DC: Tensor) -> Tensor:
    """Takes the first input, then repeatedly the one least like those taken, as long as one is
    different, then the others in the order drawn.

    Inputs of a toy model have one feature or more. A feature that any input has alone thus gets a
    component, and more of the remaining ones the more often it is alone.
    """
    # farthest-point choice: `likeness` is each input's cosine with the most similar one taken so
    # far
    most = min(len(pool_RD), V_DC.shape[1])
    likeness_R = pool_RD.new_full((len(pool_RD),), -1.0)
    taken: list[int] = []
    while len(taken) < most and likeness_R.min() < LIKE:
        taken.append(int(likeness_R.argmin()))
        cosines_R = (pool_RD @ pool_RD[taken[-1]]).abs().round(decimals=DECIMALS)
        likeness_R = torch.maximum(likeness_R, cosines_R)
    # no input left is different enough: fill up in the order drawn, where frequent ones come more
    # often
    others = [number for number in range(len(pool_RD)) if number not in {*taken}]
    return pool_RD[(taken + others)[:most]]
