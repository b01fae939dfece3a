"""`plan=auto` and `plan=show`: what a run needs, what the GPUs have, and what to set."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contract import Batch, Objective
from utils.errors import ConfigError
from utils.gpus import gib_of_each
from utils.measure import footprint
from utils.ranks.distributed import Dist

# returns the first batch of these shards, and a pass over it that keeps the gradients
PassOver = Callable[[range], tuple[Batch, Callable[[], None]]]
META = torch.device("meta")  # where tensors have shapes and no values
GIB = 2**30
# What is not counted: the driver's own memory with the libraries' workspaces, and what lies unused
# between tensors
DRIVER, UNUSED = 0.75 * GIB, 0.08
HOST_SHARE = 0.8  # of a machine's memory, where there is no GPU


@dataclass(frozen=True)
class Card:
    """One GPU, or a rank's share of a host without GPUs."""

    name: str
    bytes: int
    is_gpu: bool = True

    @property
    def room(self) -> int:
        """The bytes that tensors may take."""
        if not self.is_gpu:
            return int(self.bytes * HOST_SHARE)
        return int(max(0.0, self.bytes - DRIVER) * (1 - UNUSED))

    def __str__(self) -> str:
        return f"{self.name} ({gib(self.bytes)})"


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
    parameters: int = 0  # how many numbers train

    def state(self, ranks: int, split: bool) -> int:
        """Bytes that stay from step to step on one of this many ranks; `split`: ranks share what
        trains.
        """
        split_too = self.trained + self.gradients + self.remembered + self.averaged
        if split and ranks > 1:
            # of weights and gradients alike, one part is together while the next is fetched
            split_too = -(-split_too // ranks) + 4 * self.largest
        return self.frozen + split_too

    def passes(self, shards: int) -> int:
        """The peak while this many shards are computed at once."""
        return self.first + (shards - 1) * self.each


@dataclass(frozen=True)
class Layout:
    """How a run is laid out on these cards."""

    cards: Sequence[Card]
    ranks: int
    shards: int
    shard_size: int
    needs: Needs
    split: bool
    at_once: int = 1  # shards
    exact: bool = False  # gradients are added in a tree: see optim/sync/allreduce.py

    @property
    def waiting(self) -> int:
        """Bytes of the sums of branches that the tree holds at most, when a rank's last shard
        joins.
        """
        branches = 1 + (self.owned - 1).bit_length() if self.exact else 0
        return branches * self.needs.gradients

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

    @property
    def smallest(self) -> Card:
        """The card with the least memory, which decides: all ranks compute equally much."""
        return min(self.cards, key=lambda card: card.room)

    def expected(self, at_once: int) -> int:
        """Bytes on each card without its driver's."""
        state = self.needs.state(self.ranks, self.split) + self.waiting
        return state + self.needs.passes(at_once)

    @property
    def fits(self) -> bool:
        return self.expected(self.at_once) <= self.smallest.room

    def filled(self) -> Layout:
        """The layout with as many shards at once as fit."""
        room = self.smallest.room
        best = max((n for n in range(1, self.owned + 1) if self.expected(n) <= room), default=1)
        # equally many passes with fewer shards each take less memory and no more time
        return replace(self, at_once=-(-self.owned // -(-self.owned // best)))


def lay_out(
    needs: Needs,
    cards: Sequence[Card],
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
    ranks: int | None = None,
) -> Layout:
    """Lays a run on the largest of these cards. With `exact`, one shard at a time.

    `ranks` that have started have a card of `cards` each; else nothing runs yet, and cards may be
    left over: those that nobody needs, and small ones where a run does not fit otherwise.
    """
    cards = sorted(cards, key=lambda card: -card.room)
    used = cards[: ranks or shards]
    layout = Layout(used, len(used), shards, shard_size, needs, split, exact=exact)
    layout = layout if exact else layout.filled()
    larger = [] if ranks else [card for card in cards if card.room > layout.smallest.room]
    if larger and not layout.fits:
        other = lay_out(needs, larger, shards, shard_size, split, exact)
        return other if other.fits else layout
    return layout


def table(layout: Layout, can_recompute: bool) -> str:
    """The plan in rows. `can_recompute`: whether the net could recompute activations."""
    card, needs, more = layout.smallest, layout.needs, layout.at_once + 1
    names = " + ".join(f"{number} × {kind}" for kind, number in Counter(layout.cards).items())
    gpus = layout.ranks if card.is_gpu else 1
    command = f"torchrun --nproc-per-node {gpus} pretrain.py …" if gpus > 1 else "pretrain.py …"
    batch = f"of {layout.shards * layout.shard_size} a step, in {layout.passes} on each rank"
    if more <= layout.owned:
        needed = gib(layout.expected(more))
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
        ("on", names, f"{card} decides" if len({*layout.cards}) > 1 else ""),
        ("ranks", str(layout.ranks), command),
        ("micro_batch_size", str(layout.micro_batch_size), batch),
        *((name, gib(size), why) for name, (size, why) in kinds.items() if size),
    ]
    together, room = layout.expected(layout.at_once), card.room
    rows.append(("together", gib(together), f"on each; tensors may take {gib(room)}"))
    if not layout.fits:
        why = advice(layout, can_recompute)
        rows.append(("does not fit", gib(together - room), f"too much; try {why}"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"plan: {what:<{first}}  {size:<{second}}  {why}".rstrip() for what, size, why in rows
    )


def advice(layout: Layout, can_recompute: bool) -> str:
    """Returns what would make a layout fit."""
    needs, room = layout.needs, layout.smallest.room
    in_parts = needs.state(layout.ranks, True) + needs.passes(1)
    if layout.exact and replace(layout, exact=False).fits:
        return "exact=false, or more ranks, each of which adds up fewer shards"
    if not layout.split and layout.ranks > 1 and in_parts <= room:
        return "sync=fsdp, which splits weights and what optimizers remember over ranks"
    if needs.state(layout.ranks, layout.split) > room:
        return "more ranks with sync=fsdp, or a smaller net"
    more = f"shards={2 * layout.shards}, which makes another run, or a smaller global batch"
    more = "a smaller net: one example is too much by itself" if layout.shard_size == 1 else more
    return f"arch.recompute=true, or {more}" if can_recompute else more


def count(
    objective: Objective,
    tables: Sequence[Tensor],
    remembered: Iterable[Tensor],
    averages: bool,
    pass_over: PassOver,
) -> Needs:
    """Counts what a run needs, on a net without numbers."""
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)  # it stays from one pass to the next
    everything = [*objective.parameters(), *objective.buffers(), *tables]
    blocks = [footprint.size(part.parameters()) for part in objective.shardable()]

    def peak(shards: int) -> int:
        batch, one_pass = pass_over(range(shards))
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        held = [*everything, *gradients, *batch.values()]
        of_pass = footprint.peak(one_pass, held)
        return of_pass + footprint.size(batch.values())

    one, two = peak(1), peak(2)
    weights = footprint.size(trained)
    return Needs(
        trained=weights,
        gradients=weights,
        remembered=footprint.size(remembered),
        averaged=weights * averages,
        frozen=footprint.size(everything) - weights,
        largest=weights - sum(blocks) + max(blocks, default=0),
        first=one,
        each=two - one,
        parameters=sum(parameter.numel() for parameter in trained),
    )


def cards_of(dist: Dist) -> list[Card]:
    """Each rank's card if there are several ranks; else all cards of this machine."""
    host, is_gpu = socket.gethostname(), dist.device.type == "cuda"
    if is_gpu:
        alone = dist.world_size == 1
        indices = range(torch.cuda.device_count()) if alone else [dist.device.index or 0]
        found = map(torch.cuda.get_device_properties, indices)
        here = [(card.name, card.total_memory, f"{host} {card.uuid}") for card in found]
    else:
        here = [("host", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), host)]
    gathered = map(json.loads, dist.all_gather_text(json.dumps(here)))
    every = [tuple(card) for cards in gathered for card in cards]
    sharing = Counter(where for _, _, where in every)
    return [Card(name, size // sharing[where], is_gpu) for name, size, where in every]


def cards_named(text: str) -> list[Card]:
    """Parses `8x80` or `2x80+24`: GPUs of this many GiB."""
    return [Card("GPU", int(size * GIB)) for size in gib_of_each(text)]


def gib(count: float) -> str:
    """Bytes as people read them."""
    return next(
        f"{count / size:.1f} {unit}"
        for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if count >= 0.1 * size or size == 2**10
    )


def largest_that_fits(
    most: int, attempt: Callable[[int], object], parameters: Iterable[Tensor], smallest: str
) -> int:
    """Halves from `most` until `attempt` has enough memory, for `micro_batch_size=auto` on a GPU;
    `smallest` is for the error.
    """
    # What the optimizer will hold from its first step on, mostly two moments a weight, must fit
    # beside it.
    moments = [torch.empty_like(parameter) for parameter in parameters for _ in range(2)]
    size = most
    while True:
        try:
            attempt(size)
            del moments
            return size
        except torch.OutOfMemoryError:
            # what the attempt held is freed outside the handler only: its traceback keeps the
            # tensors alive
            pass
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                f"micro_batch_size=auto: not even {smallest} fits into the memory; raise shards, or"
                " lower global_batch_size"
            )
        size = -(-size // 2)
