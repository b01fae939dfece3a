"""`plan=auto` and `plan=show`: the memory that a run needs and GPUs have, and what to set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from utils.command.root import Config
from utils.plan.cards import cards_named, cards_of, gib
from utils.plan.layout import Layout, best, layouts
from utils.plan.needs import Needs
from utils.ranks.distributed import Dist


def with_plan(
    config: Config,
    needs: Needs,
    shard_size: int,
    split: bool,
    dist: Dist,
    say: Callable[[str], None],
) -> Config:
    """Returns the configuration with the micro-batch that fits, and logs why. With plan=show,
    prints that and ends the run.

    `split`: ranks share what trains. Called on all ranks together.
    """
    show = config.plan == "show"
    cards = cards_named(config.plan_cards) if config.plan_cards else cards_of(dist)
    ranks = None if show else dist.world_size
    ways = layouts(needs, cards, config.shards, shard_size, split, config.exact, ranks)
    layout, can_recompute = best(ways), config.arch.get("recompute") is False
    if show:
        if dist.is_main:
            print(table(layout, can_recompute, ways), flush=True)
        raise SystemExit(0)
    say(table(layout, can_recompute))
    size = None if config.exact else layout.micro_batch_size
    devices = {"arch.devices": layout.devices} if needs.movable else {}
    return config.with_values({"plan": False, "micro_batch_size": size, **devices})


def table(layout: Layout, can_recompute: bool, ways: Sequence[Layout] = ()) -> str:
    """The plan in rows. `can_recompute`: whether the net could recompute activations; `ways`: all
    layouts that there are.
    """
    needs, cards, more = layout.needs, layout.cards, layout.at_once + 1
    processes = layout.ranks if cards.is_gpu else 1
    command = "pretrain.py …"
    if processes > 1:
        command = f"torchrun --nproc-per-node {processes} {command}"
    if layout.devices > 1:
        command += f" arch.devices={layout.devices}"
    batch = f"of {layout.shards * layout.shard_size} a step, in {layout.passes} on each rank"
    if more <= layout.owned:
        needed = gib(layout.bytes_with(more))
        batch += f"; {more * layout.shard_size} at once would need {needed}"
    parts = "; each rank holds a part of this" if layout.split and layout.ranks > 1 else ""
    kinds = {
        "weights": (needs.trained, f"of {needs.parameters:,} parameters{parts}"),
        "gradients": (needs.gradients, ""),
        "exact=true": (layout.waiting, "gradients of shards that wait to be added"),
        "optimizer": (needs.remembered, ""),
        "averages": (needs.averaged, ""),
        "not trained": (needs.frozen, ""),
        "a pass": (needs.passes(layout.at_once), "forward and backward"),
    }
    rows = [
        ("on", str(replace(cards, number=layout.ranks * layout.devices)), ""),
        ("ranks", str(layout.ranks), command),
        ("micro_batch_size", str(layout.micro_batch_size), batch),
        *((name, gib(size), why) for name, (size, why) in kinds.items() if size),
    ]
    on_which = "on the fullest" if layout.devices > 1 else "on each"
    rows.append(("together", gib(layout.bytes), f"{on_which}; tensors may take {gib(cards.room)}"))
    if not layout.fits:
        why = advice(layout, can_recompute)
        rows.append(("does not fit", gib(layout.bytes - cards.room), f"too much; try {why}"))
    if len(ways) > 1:
        fastest = min(way.work for way in ways)
        rows += [_row_of(way, fastest) for way in ways]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"plan: {what:<{first}}  {size:<{second}}  {why}".rstrip() for what, size, why in rows
    )


def _row_of(layout: Layout, fastest: float) -> tuple[str, str, str]:
    """A row that compares a way to lay frozen models on cards with the fastest."""
    names = {1: "data parallel", len(layout.needs.movable): "a model per card"}
    fits = "" if layout.fits else "; does not fit"
    return (
        names.get(layout.devices, "hybrid"),
        f"{layout.ranks} × {layout.devices} cards",
        f"{layout.work / fastest:.2f} × the fastest step; {gib(layout.bytes)} on the fullest"
        f" card{fits}",
    )


def advice(layout: Layout, can_recompute: bool) -> str:
    """Returns what would make a layout fit."""
    needs, room = layout.needs, layout.cards.room
    in_parts = needs.state(layout.ranks, True) + needs.passes(1)
    if layout.exact and replace(layout, exact=False).fits:
        return "exact=false, or more ranks, each of which adds up fewer shards"
    if not layout.split and layout.ranks > 1 and in_parts <= room:
        return "sync=fsdp, which splits weights and the state of optimizers over ranks"
    if needs.state(layout.ranks, layout.split) > room:
        return "more ranks with sync=fsdp, or a smaller net"
    more = f"shards={2 * layout.shards}, which makes another run, or a smaller global batch"
    more = "a smaller net: one example alone is too much" if layout.shard_size == 1 else more
    return f"arch.recompute=true, or {more}" if can_recompute else more
