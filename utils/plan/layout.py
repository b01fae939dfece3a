"""How a run is laid out on cards: ranks, cards of a rank, shards at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.plan.cards import Cards
from utils.plan.needs import Needs


@dataclass(frozen=True)
class Layout:
    """Ranks on equal cards, of which a rank's first has all that trains."""

    cards: Cards
    ranks: int
    shards: int
    shard_size: int
    needs: Needs
    split: bool = False  # ranks share what trains
    exact: bool = False  # gradients are added in a tree: see optim/sync/allreduce.py
    devices: int = 1  # cards of a rank
    at_once: int = 1  # shards

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

    def bytes_with(self, at_once: int) -> int:
        """Bytes on a rank's fullest card, without its driver's. Those of a pass are counted on each
        card.
        """
        movable = self.needs.movable
        on_each = [sum(part.bytes for part in movable[n :: self.devices]) for n in self._of_rank]
        on_each[0] += self.needs.state(self.ranks, self.split) + self.waiting
        on_each[0] -= sum(part.bytes for part in movable)
        return max(on_each) + self.needs.passes(at_once)

    @property
    def bytes(self) -> int:
        return self.bytes_with(self.at_once)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.cards.room

    @property
    def work(self) -> float:
        """The operations of a step that follow one another, as a share of all: ranks, and the cards
        of a rank, compute at the same time.
        """
        movable = self.needs.movable
        together = [sum(part.work for part in movable[n :: self.devices]) for n in self._of_rank]
        return self.owned / self.shards * (1 - sum(together) + max(together))

    @property
    def _of_rank(self) -> range:
        return range(self.devices)

    def filled(self) -> Layout:
        """The layout with as many shards at once as fit."""
        fitting = [n for n in range(1, self.owned + 1) if self.bytes_with(n) <= self.cards.room]
        passes = -(-self.owned // max(fitting, default=1))
        # equally many passes with fewer shards each take less memory and no more time
        return replace(self, at_once=-(-self.owned // passes))


def layouts(
    needs: Needs,
    cards: Cards,
    shards: int,
    shard_size: int,
    split: bool = False,
    exact: bool = False,
    ranks: int | None = None,
) -> list[Layout]:
    """All ways to lay a run on cards: from data parallel, with all that is movable on each card, to
    a card for each movable part. With `exact`, one shard at a time.

    `ranks` have started; else nothing runs yet, and cards may be left over, as there are no more
    ranks than shards.
    """
    ways = []
    for devices in range(1, max(1, len(needs.movable)) + 1):
        fitting = cards.number // devices
        if fitting < (ranks or 1):
            break
        way = Layout(
            cards, ranks or min(shards, fitting), shards, shard_size, needs, split, exact, devices
        )
        ways.append(way if exact else way.filled())
    return ways


def best(ways: list[Layout]) -> Layout:
    """The fastest that fits, else the one that comes nearest."""
    if fitting := [way for way in ways if way.fits]:
        return min(fitting, key=lambda way: way.work)
    return min(ways, key=lambda way: way.bytes_with(1))
