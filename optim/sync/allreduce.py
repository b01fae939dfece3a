"""All-reduces the gradients of a step in flat buffers, after its last backward pass.

With G_s the gradient of the loss that shard s sums, and w_s the weight of its loss, a step uses

    (G_0 + G_1 + … + G_7) / (w_0 + w_1 + … + w_7)

whichever rank holds which shards: a rank adds up its own, all ranks add up their sums, and one
division follows. The order of additions, and with it the rounding, depends on the ranks.

With `exact=true` it does not. Each shard has its own backward pass, and gradients are added in a
binary tree over the shards:

    ((G_0 + G_1) + (G_2 + G_3)) + ((G_4 + G_5) + (G_6 + G_7))

If the number of ranks is a power of two that divides the shards, a rank's shards form one branch.
The rank adds up its branch, and the upper part of the tree adds up the ranks' sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optim.sync.base import Sync
from utils.ranks.distributed import Dist

ALIGN = 16  # elements between which gradients start: vectorised kernels want aligned addresses
# elements that up to eight ranks sum at a time in the tree, for the sake of memory; more ranks sum
# more, so that their messages stay as large
PART = 1 << 22


def build(exact: bool, shards: int) -> Sync:
    return ExactAllReduce(shards) if exact else AllReduce()


class AllReduce(Sync):
    """Every gradient is a view into a flat buffer, one for each dtype, in which autograd
    accumulates.
    """

    def wrap(self, objective: nn.Module, dist: Dist) -> None:
        """Lays out the buffers."""
        super().wrap(objective, dist)
        self.buffers: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        align = max(ALIGN, dist.world_size)  # the tree cuts buffers into equal slices
        # one message for each type, however many parameters there are
        for dtype in dict.fromkeys(p.dtype for p in self.parameters.values()):
            named = {name: p for name, p in self.parameters.items() if p.dtype == dtype}
            sizes = [-(-p.numel() // align) * align for p in named.values()]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=dist.device)
            self.buffers.append(buffer)
            for (name, p), room in zip(named.items(), buffer.split(sizes), strict=True):
                self._views[name] = room[: p.numel()].view(p.shape)
        self.zero()

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()
        for name, parameter in self.parameters.items():
            parameter.grad = self._views[name]

    def sum_gradients(self) -> None:
        """Sums the buffers over ranks."""
        self._gather()
        for buffer in self.buffers:
            buffer.copy_(self.over_ranks(buffer))

    def gradients(self) -> list[Tensor]:
        return self.buffers

    def _gather(self) -> None:
        """Copies gradients that code has set to None or to another tensor into the buffers."""
        for name, parameter in self.parameters.items():
            view = self._views[name]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view


class ExactAllReduce(AllReduce):
    """Gradients with the same bits at 1, 2, 4 … ranks that divide the shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        # sums of complete branches that wait for their neighbour, each a tensor for every buffer
        self._branches: list[list[Tensor]] = []
        self._shards_done = 0

    def wrap(self, objective: nn.Module, dist: Dist) -> None:
        """Lays out the buffers, and the rank's branch of the tree."""
        ranks = dist.world_size
        refused = "the configuration check should have refused this"
        assert ranks & (ranks - 1) == 0, refused
        assert self._shards % ranks == 0, refused
        self._merges = merges_after_each(self._shards // ranks)
        super().wrap(objective, dist)

    def zero(self) -> None:
        super().zero()
        self._branches, self._shards_done = [], 0

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """A context for one shard's passes: its gradients are copied, and added up in the tree."""
        yield
        self._gather()
        self._branches.append([buffer.clone() for buffer in self.buffers])
        super().zero()
        # merge as soon as a branch is complete, so that few copies wait at once
        for _ in range(self._merges[self._shards_done]):
            right = self._branches.pop()
            torch._foreach_add_(self._branches[-1], right)
        self._shards_done += 1

    def sum_gradients(self) -> None:
        """Sums this rank's branch over ranks."""
        seen = f"{self._shards_done} of {len(self._merges)} shards were seen"
        assert len(self._branches) == 1, seen
        part = PART * max(1, self.dist.world_size // 8)
        for buffer, branch in zip(self.buffers, self._branches.pop(), strict=True):
            for total, of_rank in zip(buffer.split(part), branch.split(part), strict=True):
                self._sum_into(total, of_rank)

    def over_micro_batches(self, rows: Sequence[Tensor]) -> Tensor:
        """Returns the sum of this rank's branch."""
        return tree_sum(rows)

    def over_ranks(self, tensor: Tensor) -> Tensor:
        """Adds up the ranks' tensors in the tree."""
        size = tensor.numel()
        padded = torch.nn.functional.pad(tensor, (0, -size % self.dist.world_size))
        return self._sum_into(torch.empty_like(padded), padded)[:size]

    def _sum_into(self, total: Tensor, of_rank: Tensor) -> Tensor:
        """Each rank adds one slice and gathers the others, which is the traffic of an ordinary
        all-reduce.
        """
        # each rank gets the same slice of all ranks, in their order, and adds these in the tree
        slices = self.dist.all_to_all(of_rank).view(self.dist.world_size, -1)
        return self.dist.all_gather_into(total, tree_sum(list(slices)))


def tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the leaves, added in a binary tree that halves them recursively."""
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return tree_sum(leaves[:middle]) + tree_sum(leaves[middle:])


def merges_after_each(leaves: int) -> list[int]:
    """Returns, for each leaf in order, how many additions of the tree can follow it."""
    if leaves == 1:
        return [0]
    middle = leaves // 2
    merges = merges_after_each(middle) + merges_after_each(leaves - middle)
    merges[-1] += 1
    return merges
