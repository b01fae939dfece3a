"""Finds how many shards fit into memory at once: by counting, for `plan`, or by trying, for
`micro_batch_size=auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from contract import Objective, Source
from data.stream import first_batch
from models.objective import make_objective, rehearse, trained
from optim.sync.base import Sync
from trial.optimizers import remembered
from utils.command.keys import find
from utils.command.root import Config
from utils.plan import settle
from utils.plan.attempts import largest_that_fits
from utils.plan.needs import META, count
from utils.ranks.distributed import Dist


def with_plan(config: Config, source: Source, dist: Dist, say: Callable[[str], None]) -> Config:
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
    splits_weights = getattr(find(config.sync, "sync"), "splits_weights", False)
    return settle.with_plan(config, needs, shard_size, splits_weights, dist, say)


def group_shards(config: Config, source: Source, objective: Objective, sync: Sync) -> list[range]:
    """Groups this rank's shards into micro-batches, which the device computes one after another.
    Ranks may differ in it: results do not depend on it.
    """
    device, owned = sync.dist.device, sync.dist.owned_shards(config.shards)
    shard_size = source.length.examples_per_update // config.shards
    at_once = len(owned)
    if config.exact:
        at_once = 1  # gradients are added shard by shard
    elif isinstance(config.micro_batch_size, int):
        at_once = config.micro_batch_size // shard_size
    elif config.micro_batch_size == "auto" and device.type == "cuda":

        def attempt(shards: int) -> None:
            rehearse(objective, *first_batch(source, config.seed, device, owned[:shards]))

        smallest, parameters = f"one shard of {shard_size} examples", sync.parameters.values()
        at_once = largest_that_fits(at_once, attempt, parameters, smallest)
    return [owned[i : i + at_once] for i in range(0, len(owned), at_once)]
