"""Gradients with the same bits at 1, 2, 4 … ranks that divide the shards: computed shard by shard,
and added in one fixed binary tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optim.sync.allreduce import Reducer
from optim.sync.base import Verdict
from optim.sync.buckets import Bucket
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, Notices


class ExactReducer(Reducer):
    """Computes one shard per backward pass, and sends nothing before the last one is done.

    The tree halves the shards recursively. If the number of ranks is a power of two that divides
    the shards, a rank's shards form one branch: the rank adds up its branch, and the upper part of
    the tree adds up the ranks' sums.
    """

    def __init__(self, shards: int, bucket_mb: float = 16.0) -> None:
        super().__init__(bucket_mb)
        self._shards = shards
        # sums of complete branches that wait for their neighbour, each with one tensor per bucket
        self._branches: list[list[Tensor]] = []
        self._shards_done = 0

    def wrap(self, objective: nn.Module, dist: Dist) -> nn.Module:
        """Lays out buckets, and the rank's branch of the tree."""
        ranks = dist.world_size
        refused = "the configuration check should have refused this"
        assert ranks & (ranks - 1) == 0, refused
        assert self._shards % ranks == 0, refused
        self._merges = merges_after_each(self._shards // ranks)
        return super().wrap(objective, dist)

    def zero(self) -> None:
        """Begins a step: clears all gradients."""
        super().zero()
        self._branches, self._shards_done = [], 0

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """A context for one shard's passes: its gradients are copied, and added up in the tree."""
        yield
        leaf = []
        for bucket in self.buckets:
            bucket.move_in(bucket.parameters)
            leaf.append(bucket.grads.clone())
            bucket.reset()
        self._branches.append(leaf)
        for _ in range(self._merges[self._shards_done]):
            right = self._branches.pop()
            torch._foreach_add_(self._branches[-1], right)
        self._shards_done += 1

    def finish(
        self,
        loss_weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Sums this rank's branch over ranks, and divides."""
        assert len(self._branches) == 1, (
            f"{self._shards_done} of {len(self._merges)} shards were seen"
        )
        for bucket, grads in zip(self.buckets, self._branches.pop(), strict=True):
            bucket.fill(grads)
        return super().finish(loss_weights, checked, notices, late)

    def _prepare(self) -> None:
        # buckets keep the net's order: nothing is sent early
        self._arrivals = None

    def _total(self, loss_weights: Sequence[Tensor | float]) -> Tensor:
        return tree_sum(
            [
                torch.as_tensor(weight, dtype=torch.float32, device=self.dist.device)
                for weight in loss_weights
            ]
        )

    def _over_micro_batches(self, rows: Sequence[Tensor]) -> Tensor:
        return tree_sum(rows)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        """Adds up the ranks' tensors in the tree. Each rank adds one slice and gathers the others,
        which is the traffic of an ordinary all-reduce.
        """
        ranks, size = self.dist.world_size, tensor.numel()
        padded = torch.nn.functional.pad(tensor, (0, -size % ranks))
        slices = self.dist.all_to_all(padded).view(ranks, -1)
        return torch.cat(self.dist.all_gather(tree_sum(list(slices))))[:size]

    def _sum_over_ranks(self, bucket: Bucket) -> None:
        with self._waited.running():
            bucket.flat.copy_(self._over_ranks(bucket.flat))


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
