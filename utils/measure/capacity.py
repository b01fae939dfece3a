"""`plan=auto` and `plan=show`: what a run needs, what the GPUs have, and what to set."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contract import Batch, Objective
from utils.errors import ConfigError
from utils.gpus import gib_of_each
from utils.measure import footprint
from utils.ranks.devices import devices_of
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
class Movable:
    """A frozen part of a net that may lie on another card of its rank."""

    bytes: int
    work: float  # its share of the operations of a step


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
    movable: Sequence[Movable] = ()  # of what is frozen, what may lie on other cards of a rank

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
    """How a run is laid out: the cards of each rank, of which the first has all that trains."""

    hands: Sequence[Sequence[Card]]
    shards: int
    shard_size: int
    needs: Needs
    split: bool
    at_once: int = 1  # shards
    exact: bool = False  # gradients are added in a tree: see optim/sync/allreduce.py

    @property
    def cards(self) -> list[Card]:
        return [card for hand in self.hands for card in hand]

    @property
    def ranks(self) -> int:
        return len(self.hands)

    @property
    def devices(self) -> int:
        """The most cards of a rank."""
        return max(len(hand) for hand in self.hands)

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

    def loads(self, at_once: int) -> Iterator[tuple[Card, int]]:
        """Yields every card with the bytes on it, without its driver's. Those of a pass are counted
        on each of a rank's cards.
        """
        movable, passes = self.needs.movable, self.needs.passes(at_once)
        state = self.needs.state(self.ranks, self.split) + self.waiting
        for hand in self.hands:
            bytes_on = [passes] * len(hand)
            bytes_on[0] += state - sum(part.bytes for part in movable)
            for number, part in enumerate(movable):
                bytes_on[number % len(hand)] += part.bytes
            yield from zip(hand, bytes_on, strict=True)

    def fullest(self, at_once: int) -> tuple[Card, int]:
        """The card with the least room left, which decides, and the bytes on it."""
        return min(self.loads(at_once), key=lambda load: load[0].room - load[1])

    def fits_with(self, at_once: int) -> bool:
        card, needed = self.fullest(at_once)
        return needed <= card.room

    @property
    def fits(self) -> bool:
        return self.fits_with(self.at_once)

    @property
    def work(self) -> float:
        """What the busiest rank computes one after another, as a share of all that a step takes;
        cards of one rank compute at the same time.
        """
        busiest = 0.0
        for rank, hand in enumerate(self.hands):
            together = [0.0] * len(hand)
            for number, part in enumerate(self.needs.movable):
                together[number % len(hand)] += part.work
            alone = 1 - sum(together)
            owned = self.shards // self.ranks + (rank < self.shards % self.ranks)
            busiest = max(busiest, owned / self.shards * (alone + max(together)))
        return busiest

    def filled(self) -> Layout:
        """The layout with as many shards at once as fit."""
        best = max((n for n in range(1, self.owned + 1) if self.fits_with(n)), default=1)
        # equally many passes with fewer shards each take less memory and no more time
        return replace(self, at_once=-(-self.owned // -(-self.owned // best)))


def layouts(
    needs: Needs,
    cards: Sequence[Card],
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
    hands: Sequence[Sequence[Card]] = (),
) -> list[Layout]:
    """All ways to lay a run on these cards: from data parallel, with all that is movable on each
    card, to a card for each movable part. With `exact`, one shard at a time.

    `hands` are the cards of ranks that have started; else nothing runs yet, and cards may be left
    over, as there are no more ranks than shards.
    """
    cards = sorted(cards, key=lambda card: -card.room)
    ways: dict[tuple[int, ...], Layout] = {}
    for devices in range(1, max(1, len(needs.movable)) + 1):
        dealt = [hand[:devices] for hand in hands]
        if not hands:
            ranks = min(shards, -(-len(cards) // devices))
            used = cards[: ranks * devices]
            dealt = [used[rank::ranks] for rank in range(ranks)]
        layout = Layout(dealt, shards, shard_size, needs, split, exact=exact)
        ways.setdefault(tuple(map(len, dealt)), layout if exact else layout.filled())
    return [*ways.values()]


def lay_out(
    needs: Needs,
    cards: Sequence[Card],
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
    hands: Sequence[Sequence[Card]] = (),
) -> Layout:
    """Chooses the fastest of `layouts` that fits, without small cards where a run does not fit
    otherwise and no ranks have started; else the one that comes nearest.
    """
    ways = layouts(needs, cards, shards, shard_size, split, exact, hands)
    if fitting := [way for way in ways if way.fits]:
        return min(fitting, key=lambda way: way.work)
    least = min(card.room for card in ways[0].cards)
    larger = [] if hands else [card for card in cards if card.room > least]
    if larger:
        other = lay_out(needs, larger, shards, shard_size, split, exact)
        if other.fits:
            return other
    return min(ways, key=lambda way: way.fullest(1)[1] - way.fullest(1)[0].room)


def table(layout: Layout, can_recompute: bool, ways: Sequence[Layout] = ()) -> str:
    """The plan in rows. `can_recompute`: whether the net could recompute activations; `ways`: all
    layouts that there are.
    """
    needs, more = layout.needs, layout.at_once + 1
    card, together = layout.fullest(layout.at_once)
    names = " + ".join(f"{number} × {kind}" for kind, number in Counter(layout.cards).items())
    processes = layout.ranks if card.is_gpu else 1
    command = "pretrain.py …"
    if processes > 1:
        command = f"torchrun --nproc-per-node {processes} {command}"
    if layout.devices > 1:
        command += f" arch.devices={layout.devices}"
    batch = f"of {layout.shards * layout.shard_size} a step, in {layout.passes} on each rank"
    if more <= layout.owned:
        needed = gib(layout.fullest(more)[1])
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
    on_which = "on the fullest" if layout.devices > 1 else "on each"
    rows.append(("together", gib(together), f"{on_which}; tensors may take {gib(card.room)}"))
    if not layout.fits:
        why = advice(layout, can_recompute)
        rows.append(("does not fit", gib(together - card.room), f"too much; try {why}"))
    if len(ways) > 1:
        fastest = min(way.work for way in ways)
        rows += [_row_of(way, fastest) for way in ways]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"plan: {what:<{first}}  {size:<{second}}  {why}".rstrip() for what, size, why in rows
    )


def _row_of(layout: Layout, fastest: float) -> tuple[str, str, str]:
    """A row that compares a way to lay frozen models on cards with the fastest."""
    sizes = [len(hand) for hand in layout.hands]
    way = "data parallel" if layout.devices == 1 else "hybrid"
    if min(sizes) == len(layout.needs.movable) > 1:
        way = "a model per card"
    needed = gib(layout.fullest(layout.at_once)[1])
    fits = "" if layout.fits else "; does not fit"
    about = f"{layout.work / fastest:.2f} × the fastest step; {needed} on the fullest card{fits}"
    return way, f"{' + '.join(map(str, sizes))} cards", about


def advice(layout: Layout, can_recompute: bool) -> str:
    """Returns what would make a layout fit."""
    needs, room = layout.needs, layout.fullest(1)[0].room
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
        movable=[
            Movable(footprint.size(part.parameters()), work) for part, work in objective.movable()
        ],
    )


def cards_of(dist: Dist) -> list[list[Card]]:
    """The cards of each rank: its own, and its share of those that no rank of its host uses."""
    host, is_gpu = socket.gethostname(), dist.device.type == "cuda"
    if is_gpu:
        found = map(torch.cuda.get_device_properties, devices_of(dist))
        here = [(card.name, card.total_memory, f"{host} {card.uuid}") for card in found]
    else:
        here = [("host", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), host)]
    gathered = [json.loads(text) for text in dist.all_gather_text(json.dumps(here))]
    sharing = Counter(where for hand in gathered for _, _, where in hand)
    return [
        [Card(name, size // sharing[where], is_gpu) for name, size, where in hand]
        for hand in gathered
    ]


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
