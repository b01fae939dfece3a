"""Builds an objective, finds the tensors that a run saves, shares or trains, and tries one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from contract import Batch, Carry, Context, Objective, Spec
from models.frozen import Frozen
from models.sparse_embedding import SparseEmbedding
from utils.checkpoint import reader
from utils.checkpoint.registry import check_alike
from utils.command.instantiate import make
from utils.errors import said_of
from utils.measure.hardware import count_flops
from utils.noise import Noise, give_noise, seeded
from utils.ranks.distributed import Dist
from utils.transfer import fill

T = TypeVar("T")


def make_objective(
    arch: Any, seed: int, spec: Spec, device: torch.device | None = None
) -> Objective:
    """Builds a net and its loss on `device`, with initial weights drawn on the CPU, from the
    global generators as initialisers do.
    """
    with seeded(seed), nullcontext() if device is None else device:
        net = make({key: value for key, value in arch.items() if key != "loss"}, "arch", spec)
        objective: Objective = make(arch.get("loss"), "arch.loss", net)
    return objective.to(device, torch.float64 if objective.dtype == torch.float64 else None)


def trained(objective: Objective) -> dict[str, nn.Parameter]:
    """The parameters that optimizers may update, by name."""
    return {name: p for name, p in objective.named_parameters() if p.requires_grad}


def tables_of(objective: Objective) -> dict[str, SparseEmbedding]:
    """The sparse tables that train, by name, for the sparse optimizer."""
    modules = objective.named_modules()
    tables = {name: module for name, module in modules if isinstance(module, SparseEmbedding)}
    return _without_frozen(objective, tables)


def frozen_files(objective: Objective) -> dict[str, dict[str, str]]:
    """The path and the hash of each frozen part, by its name."""
    # a part may be reached by several names
    modules = objective.named_modules(remove_duplicate=False)
    return {
        name: {"path": part.path, "sha256": part.sha256}
        for name, part in modules
        if isinstance(part, Frozen)
    }


def saved_tensors(objective: Objective) -> dict[str, Tensor]:
    """The live tensors that a checkpoint holds, without those of frozen parts."""
    return _without_frozen(objective, objective.state_dict())


def load_tensors(objective: Objective, tensors: Mapping[str, Tensor]) -> None:
    """Copies in what `saved_tensors` returned; raises KeyError if the names differ."""
    live = saved_tensors(objective)
    if wrong := sorted(live.keys() ^ tensors.keys()):
        raise KeyError(f"{wrong[0]} is only in the net or only in what is loaded")
    for name, tensor in live.items():
        fill(tensor, tensors[name])


def shared_tensors(objective: Objective) -> dict[str, Tensor]:
    """The tensors that rank 0 broadcasts: all that are saved, and other buffers."""
    buffers = _without_frozen(objective, dict(objective.named_buffers()))
    return saved_tensors(objective) | buffers


def _without_frozen(objective: Objective, named: Mapping[str, T]) -> dict[str, T]:
    prefixes = tuple(f"{name}." for name in frozen_files(objective))
    return {name: value for name, value in named.items() if not name.startswith(prefixes)}


def start_from(objective: Objective, path: str, say: Callable[[str], None]) -> None:
    """Loads the weights with which a run begins: of a run, a file, or a format of others.

    If a puzzle table has another number of rows here, every row begins as the mean row.
    """
    published, live = getattr(objective, "published", None), saved_tensors(objective)
    read = published(path) if published else None
    if read is None:
        with said_of("init_from"):
            read = reader.load(path, ["model"])[0].get("model", {})
    weights = dict(read)
    for name in (f"{table}.weights" for table in tables_of(objective)):
        there, here = weights.get(name), live[name]
        if there is None or there.shape[1:] != here.shape[1:] or len(there) in (0, len(here)):
            continue
        mean = there.double().mean(0, keepdim=True).to(there.dtype)
        weights[name] = mean.expand(len(here), -1)
        say(
            f"init_from={path}: {name} has {len(there):,} rows there and {len(here):,} here; every"
            " row begins as their mean"
        )
    check_alike(live, weights, f"init_from={path}", any_precision=True)
    load_tensors(objective, weights)


def to_devices(objective: Objective, dist: Dist) -> None:
    """Moves the net to this rank's device, or as the objective spreads it over several."""
    if spread := getattr(objective, "spread", None):
        spread(dist)
    else:
        with dist.agreed():
            objective.to(dist.device)


def prepare(objective: Objective, dist: Dist, source: Any, noise: Noise) -> None:
    """Prepares a new net by a warm-up or from the data, if its objective does so."""
    if begin := getattr(objective, "prepare", None):
        begin(dist, source, noise)


def statistics_of(
    objective: Objective, batch: Batch, carry: Carry, ctx: Context
) -> dict[str, Tensor]:
    """Calls `statistics` with the dropout that `forward` will have."""
    give_noise(objective.dropouts, ctx.noise)
    return objective.statistics(batch, carry, ctx)


def rehearse(objective: Objective, batch: Batch, ctx: Context, keep: bool = False) -> None:
    """Runs one forward and backward pass on this rank alone, for measuring memory or FLOPs.

    Changes nothing, except that with `keep` the gradients stay. The pass has the `progress` of the
    last step, where nets are deepest.
    """
    try:
        # totals first, as in a training step, for a loss that needs those of all ranks
        carry = objective.initial_carry(batch)
        with torch.no_grad():
            totals = statistics_of(objective, batch, carry, ctx)
        objective(batch, carry, replace(ctx, totals=totals, progress=1.0)).loss.backward()
    finally:
        objective.zero_grad(set_to_none=not keep)
        for table in tables_of(objective).values():
            table.take_row_grads()


def judging_metric(objective: Objective, asked: str | None) -> str:
    """Returns the metric that chooses the best checkpoint, as `objective_metric` takes it: with a
    minus if lower is better. By default, it is the objective's main metric.
    """
    name = asked.removeprefix("-") if asked else f"eval/{objective.headline}"
    # a user who names a cost means its smallest value, with or without the minus
    is_cost = name.rpartition("/")[2] in objective.costs
    return f"-{name}" if is_cost or (asked or "").startswith("-") else name


def lower_is_better(metric: str, results: Mapping[str, float]) -> float | None:
    """Returns a result for sweepers, or its negative; `metric` is that of `judging_metric`."""
    value = results.get(metric.removeprefix("-"))
    return value if value is None or metric.startswith("-") else -value


def flops_per_example(objective: Objective, batch: Batch, ctx: Context) -> int:
    """The FLOPs of an example's forward and backward pass, given by the objective or counted."""
    if stated := getattr(objective, "flops_per_example", None):
        return stated()
    return count_flops(lambda: rehearse(objective, batch, ctx)) // len(next(iter(batch.values())))
