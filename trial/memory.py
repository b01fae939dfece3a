"""Counts the memory that a run needs, for `plan`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from contract import Source
from data.stream import first_batch
from models.objective import make_objective, rehearse, trained
from trial.optimizers import remembered
from utils.command.root import Config
from utils.plan import settle
from utils.plan.needs import META, count
from utils.ranks.distributed import Dist


def with_plan(
    config: Config, source: Source, splits_weights: bool, dist: Dist, say: Callable[[str], None]
) -> Config:
    """Returns the configuration with the micro-batch that fits, if it asks for a plan, counted on a
    net without numbers. With plan=show, prints what was counted and ends the run.
    """
    if not config.plan:
        return config
    net = make_objective(config.arch, config.seed, source.spec, META)
    optimizer_state = remembered(config.optim["dense"], trained(net)).values()
    first = partial(first_batch, source, config.seed, META)
    needs = count(net, optimizer_state, config.ema, first, partial(rehearse, net, keep=True))
    shard_size = source.length.examples_per_update // config.shards
    return settle.with_plan(config, needs, shard_size, splits_weights, dist, say)
