"""`plan=auto` and `plan=show`: what a run needs, what the GPUs have, and what to set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from utils.measure import footprint
from utils.measure.cards import Card, attention, cards_named, cards_of, gib, precision, smallest
from utils.ranks.devices import home, most_devices
from utils.ranks.distributed import Dist

META = torch.device("meta")  # where tensors have shapes and no values


@dataclass(frozen=True)
class Needs:
    """Memory in bytes of a rank that computes alone.

    `first` is a pass over one shard, `each` every further shard at once with it.
    """

    trained: int
    gradients: int
    remembered: int  # by optimizers
    averaged: int
    frozen: int  # weights and tables that no gradient reaches
    # the part whose weights lie together while it computes, where weights are split over ranks
    largest: int
    first: int
    each: int
    attends: bool = False  # whether the net has attention
    # of what is frozen, those parts that may lie on devices of their own
    models: Sequence[int] = ()
    parameters: int = 0  # how many numbers train

    def state(self, ranks: int, split: bool) -> int:
        """Bytes that stay from step to step on one of this many ranks; `split`: ranks share what
        trains.
        """
        own = self.trained + self.gradients + self.remembered + self.averaged
        # of weights and gradients alike, one part is together while the next is fetched
        return self.frozen + (
            own if not split or ranks == 1 else -(-own // ranks) + 4 * self.largest
        )

    def fullest(self, ranks: int, split: bool, devices: int) -> int:
        """Bytes that stay on the fullest device of a rank: `home` spreads the models, the rest is
        on the first.
        """
        loads = [self.state(ranks, split) - sum(self.models)] + [0] * (devices - 1)
        for number, model in enumerate(self.models):
            loads[home(number, len(self.models), devices)] += model
        return max(loads)

    def passes(self, shards: int) -> int:
        """The peak while this many shards are computed at once."""
        return self.first + (shards - 1) * self.each


@dataclass(frozen=True)
class Layout:
    """How a run is laid out on these cards."""

    cards: Sequence[Card]
    ranks: int
    devices: int  # of each rank
    shards: int
    shard_size: int
    needs: Needs
    split: bool
    at_once: int  # shards

    @property
    def owned(self) -> int:
        """The shards of the rank that has most."""
        return -(-self.shards // self.ranks)

    @property
    def passes(self) -> int:
        return -(-self.owned // self.at_once)

    @property
    def micro_batch_size(self) -> int:
        return self.at_once * self.shard_size

    def expected(self, at_once: int) -> int:
        """Bytes on each card without its driver's; an upper bound if a rank has several devices."""
        return self.needs.fullest(self.ranks, self.split, self.devices) + self.needs.passes(at_once)

    @property
    def fits(self) -> bool:
        return self.expected(self.at_once) <= smallest(self.cards).room


def choose(
    needs: Needs,
    cards: Sequence[Card],
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
    free: bool = False,
    spread: int = 1,
) -> Layout:
    """Chooses a layout with as many shards at once as fit, at least one; with `exact`, one at a
    time.

    With `free`, no ranks are started yet: small cards may be left out, and a rank may have several.
    Otherwise each card is a rank's, which may have up to `spread` like it.
    """
    cards = sorted(cards, key=lambda card: -card.room)
    most = min(len(needs.models) + 1, len(cards) if free else spread)
    layouts = []
    for devices in range(1, most + 1):
        ranks = min(shards, len(cards) // devices if free else len(cards))
        used = cards[: ranks * devices] if free else cards[:ranks]
        # what would be left over is of use to models
        wide = min(most, len(cards) // ranks) if free and devices > 1 else devices
        layouts.append(
            _fill(Layout(used, ranks, devices, shards, shard_size, needs, split, 1), exact)
        )
        wider = (
            _fill(replace(layouts[-1], devices=wide, cards=cards[: ranks * wide]), exact)
            if wide > devices
            else layouts[-1]
        )
        if layouts[-1].fits:
            return max(wider, layouts[-1], key=lambda layout: layout.at_once if layout.fits else 0)
    larger = [card for card in cards[:shards] if card.room > smallest(cards[:shards]).room]
    fewer = (
        [choose(needs, larger, shards, shard_size, split, exact, free)] if free and larger else []
    )
    return next(
        (layout for layout in fewer if layout.fits),
        min(layouts, key=lambda layout: layout.expected(1)),
    )


def spreads(
    needs: Needs,
    cards: Sequence[Card],
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
) -> list[Layout]:
    """All ways to lay frozen models on cards on which nothing runs yet: from data parallel, with
    every model on each card, to a card for each model. Empty where there is no choice.
    """
    cards = sorted(cards, key=lambda card: -card.room)
    layouts = []
    for devices in range(1, min(len(needs.models) + 1, len(cards)) + 1):
        ranks = min(shards, len(cards) // devices)
        used = cards[: ranks * devices]
        layouts.append(
            _fill(Layout(used, ranks, devices, shards, shard_size, needs, split, 1), exact)
        )
    return layouts if len(layouts) > 1 else []


def _fill(layout: Layout, exact: bool) -> Layout:
    """The layout with as many shards at once as fit."""
    fitting = [
        n for n in range(1, layout.owned + 1) if layout.expected(n) <= smallest(layout.cards).room
    ]
    best = 1 if exact or not fitting else fitting[-1]
    # equally many passes with fewer shards each take less memory and no more time
    return replace(layout, at_once=-(-layout.owned // -(-layout.owned // best)))


def advice(layout: Layout, recompute: bool) -> str:
    """Returns changes that would make the layout fit; empty if it fits. `recompute`: whether the
    net could recompute activations.
    """
    needs, room = layout.needs, smallest(layout.cards).room
    if layout.fits:
        return ""
    if (
        not layout.split
        and layout.ranks > 1
        and needs.state(layout.ranks, True) + needs.passes(1) <= room
    ):
        return "sync=fsdp, which splits weights and what optimizers remember over ranks"
    if needs.state(layout.ranks, layout.split) > room:
        return (
            "more ranks with sync=fsdp, or a smaller net: weights and what belongs to them do not"
            " fit by themselves"
        )
    more = f"shards={2 * layout.shards}, which makes another run, or a smaller global batch"
    more = "a smaller net: one example is too much by itself" if layout.shard_size == 1 else more
    return f"arch.recompute=true, or {more}" if recompute else more


def apply_plan(
    cfg: Any,
    dist: Dist,
    length: Any,
    split: bool,
    objective: Any,
    remembered: Mapping[str, Tensor],
    beginning: Callable[[range], tuple[Any, Any]],
    say: Callable[[str], None],
) -> None:
    """Applies `plan`: sets the chosen layout on all ranks alike, and says why. With `plan=show`,
    prints the layout and ends the run.

    `split`: whether the sync splits weights over ranks. `objective` is on the meta device, and
    so are the tensors that its optimizers remember; `beginning` returns the first batch of a number
    of shards there.
    """
    needs = count(objective, remembered.values(), cfg.ema, beginning)
    cards = cards_named(cfg.plan_cards) if cfg.plan_cards else cards_of(dist)
    shown = cfg.plan == "show"
    cards = cards if shown or dist.world_size > 1 else cards[:1]
    spread = most_devices(dist) if needs.models and not shown else 1
    layout = choose(
        needs,
        cards,
        cfg.shards,
        length.examples_per_update // cfg.shards,
        split,
        cfg.exact,
        shown,
        spread,
    )
    gpus = layout.ranks if cards[0].is_gpu else 1
    command = (
        f"torchrun --nproc-per-node {gpus} pretrain.py …" if gpus > 1 else "python pretrain.py …"
    )
    command += f" arch.devices={layout.devices}" if layout.devices > 1 else ""
    if left := Counter(cards) - Counter(layout.cards):
        command += f"; {', '.join(map(str, left))} left out"
    text = table(
        layout,
        cfg.arch,
        cfg.optim.dense,
        command if shown and dist.world_size == 1 else "as started",
        spreads(needs, cards, cfg.shards, layout.shard_size, split, cfg.exact) if shown else (),
    )
    if shown:
        if dist.is_main:
            print(text, flush=True)
        raise SystemExit(0)
    say(text)
    cfg.plan = False  # what follows is said in numbers, by which the run goes on
    if needs.models:
        cfg.arch.devices = layout.devices
    if not cfg.exact:  # which computes one shard at a time, and says so itself
        cfg.micro_batch_size = layout.micro_batch_size


def table(
    layout: Layout, arch: Any, optimizers: Any, command: str, others: Sequence[Layout] = ()
) -> str:
    """The plan as text: what, how much, and why, and beside it the `others` that there are."""
    dtype, fused = (
        str(arch.get("forward_dtype", "float32")),
        any(entry["optimizer"].get("fused") for entry in optimizers),
    )
    card, needs, next_size = smallest(layout.cards), layout.needs, layout.at_once + 1
    names = " + ".join(f"{number} × {each}" for each, number in Counter(layout.cards).items())
    least = (
        "" if len({each.room for each in layout.cards}) == 1 else f"{card} has least, and decides"
    )
    more = (
        f"{next_size * layout.shard_size} at once would need {gib(layout.expected(next_size))}"
        if next_size <= layout.owned
        else "all at once"
    )
    batch_size = layout.shards * layout.shard_size
    batch = f"of {batch_size} examples a step, in {layout.passes} on each rank; {more}"
    ways = (
        f"data parallel, at most {layout.owned} of {layout.shards} shards on each; {command}"
        if layout.ranks > 1
        else command
    )
    parted = (
        "with gradients, optimizer and averages in parts, one on each rank"
        if layout.split and layout.ranks > 1
        else ""
    )
    of_parameters = f"of {needs.parameters:,} parameters{parted and f', {parted}'}"
    kernels = ("one kernel" if fused else "few kernels") + " for all weights" if card.is_gpu else ""
    joined = "what a compiler joins needs less" if card.is_gpu else ""
    state = {
        "weights": (needs.trained, of_parameters),
        "gradients": (needs.gradients, ""),
        "optimizer": (needs.remembered, kernels),
        "averages": (needs.averaged, ""),
        "not trained": (needs.frozen, ""),
        "a pass": (needs.passes(layout.at_once), joined),
    }
    rows = [
        ("on", names, least),
        ("ranks", str(layout.ranks), ways),
        *(
            [
                (
                    "arch.devices",
                    str(layout.devices),
                    "of each rank, over which its models are spread",
                )
            ]
            if layout.devices > 1
            else []
        ),
        ("micro_batch_size", str(layout.micro_batch_size), batch),
        ("forward_dtype", dtype, precision(card, dtype)),
        *([("attention", *attention(card, dtype))] if needs.attends else []),
        *((name, gib(number), why) for name, (number, why) in state.items() if number),
        (
            "together",
            gib(layout.expected(layout.at_once)),
            f"on each; tensors may take {gib(card.room)}",
        ),
    ]
    if not layout.fits:
        rows.append(
            (
                "does not fit",
                gib(layout.expected(layout.at_once) - card.room),
                f"too much; try {advice(layout, arch.get('recompute') is False)}",
            )
        )
    rows += [_other(each) for each in others]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"plan: {what:<{widths[0]}}  {value:<{widths[1]}}  {why}".rstrip()
        for what, value, why in rows
    )


def _other(layout: Layout) -> tuple[str, str, str]:
    """A row that says how frozen models could lie on the cards."""
    models, needed = len(layout.needs.models), layout.expected(layout.at_once)
    on_each = -(-models // layout.devices)
    if layout.devices == 1:
        name = "data parallel" if layout.ranks > 1 else "one GPU"
        where = "every model on each GPU"
    else:
        name = "one rank" if layout.ranks == 1 else "hybrid"
        where = "one model on a GPU" if on_each == 1 else f"up to {on_each} models on a GPU"
        where += ", what trains on one more" if layout.devices > models else ""
    fits = "" if layout.fits else "; does not fit"
    return (
        name,
        f"{layout.ranks} × {layout.devices}",
        f"ranks × arch.devices: {where}; {layout.micro_batch_size} examples at once,"
        f" {gib(needed)} on the fullest{fits}",
    )


def count(
    objective: Any,
    remembered: Iterable[Tensor],
    averages: bool,
    beginning: Callable[[range], tuple[Any, Any]],
) -> Needs:
    """Counts what a run needs on a net without numbers; `beginning` gives a batch of so many shards
    and its context.
    """
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)  # it stays from one pass to the next
    tables = [table.weights for table in objective.tables().values()]
    everything = [*objective.parameters(), *objective.buffers(), *tables]
    blocks = [footprint.size(part.parameters()) for part in objective.shardable()]

    def pass_over(shards: int) -> footprint.Pass:
        batch, context = beginning(range(shards))
        known = [
            *everything,
            *(parameter.grad for parameter in trained if parameter.grad is not None),
            *batch.values(),
        ]
        seen = footprint.watch(lambda: objective.rehearse(batch, context, keep=True), known)
        return replace(seen, peak=seen.peak + footprint.size(batch.values()))

    one, two = pass_over(1), pass_over(2)
    weights = footprint.size(trained)
    return Needs(
        trained=weights,
        gradients=weights,
        remembered=footprint.size(remembered),
        averaged=(weights + footprint.size(tables)) * averages,
        frozen=footprint.size(everything) - weights,
        largest=weights - sum(blocks) + max(blocks, default=0),
        first=one.peak,
        each=two.peak - one.peak,
        attends=one.attends,
        models=[footprint.size(part.parameters()) for part in objective.movable()],
        parameters=sum(parameter.numel() for parameter in trained),
    )
