"""The fixed tree, and what a rank may add up on its way through it. With several ranks:
ranks_allreduce.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.sync.allreduce import ExactAllReduce, merges_after_each, tree_sum
from utils.plan.cards import GIB, Cards
from utils.plan.layout import layouts
from utils.plan.needs import Needs
from utils.plan.settle import advice
from utils.ranks.distributed import Dist


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 8, 12])
def test_adding_on_the_way_is_the_tree(leaves: int) -> None:
    values = list(torch.rand(leaves, 1000, generator=torch.Generator().manual_seed(0)))
    stack: list[torch.Tensor] = []
    for value, merges in zip(values, merges_after_each(leaves), strict=True):
        stack.append(value.clone())
        for _ in range(merges):
            right = stack.pop()
            stack[-1] = stack[-1] + right
    assert len(stack) == 1
    assert torch.equal(stack[0], tree_sum(values))


@pytest.mark.parametrize(("shards", "ranks"), [(8, 2), (8, 8), (12, 4), (6, 2), (24, 8)])
def test_equal_blocks_are_branches_of_the_tree(shards: int, ranks: int) -> None:
    values = list(torch.rand(shards, 1000, generator=torch.Generator().manual_seed(0)))
    size = shards // ranks
    blocks = [tree_sum(values[rank * size : (rank + 1) * size]) for rank in range(ranks)]
    assert torch.equal(tree_sum(blocks), tree_sum(values))
    in_order = torch.stack(values).cumsum(0)[-1]
    assert not torch.equal(in_order, tree_sum(values)), (
        "the values must be such that the order matters"
    )


def test_a_parameter_reached_by_some_shards_only() -> None:
    """A shard without a gradient adds a zero, and the next shard's does not land on the last
    one's.
    """
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    reducer = ExactAllReduce(shards=4)
    reducer.wrap(nn.ParameterDict({"a": a, "b": b}), Dist())
    for _ in range(2):
        reducer.zero()
        for shard in range(4):
            with reducer.micro_batch(last=shard == 3):
                ((a if shard % 2 else b).sum() * (shard + 1)).backward()
        reducer.finish()
        reducer.divide(torch.tensor(4.0))
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.tolist() == [6 / 4] * 3
        assert b.grad.tolist() == [4 / 4] * 3


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 6, 8, 12])
def test_a_plan_counts_the_branches_that_wait(shards: int) -> None:
    class Branches(list[list[torch.Tensor]]):
        most = 0

        def append(self, branch: list[torch.Tensor]) -> None:
            super().append(branch)
            self.most = max(self.most, len(self))

    weight = nn.Parameter(torch.ones(16))
    reducer = ExactAllReduce(shards)
    reducer.wrap(nn.ParameterDict({"weight": weight}), Dist())
    reducer._branches = branches = Branches()
    for shard in range(shards):
        with reducer.micro_batch(last=shard == shards - 1):
            weight.sum().backward()
    gradients = weight.nbytes
    needs = Needs(
        trained=gradients, gradients=gradients, remembered=0, averaged=0, frozen=0,
        largest=0, first=0, each=0,
    )  # fmt: skip
    plain, exact = (
        layouts(needs, Cards(1, GIB), shards, 1, exact=each)[0].bytes_with(1)
        for each in (False, True)
    )
    assert exact == plain + branches.most * gradients


def test_a_plan_that_the_branches_do_not_fit_says_so() -> None:
    needs = Needs(
        trained=GIB, gradients=GIB, remembered=GIB, averaged=0, frozen=0,
        largest=0, first=GIB, each=GIB,
    )  # fmt: skip
    (layout,) = layouts(needs, Cards(1, 8 * GIB), 8, 1, exact=True)
    assert not layout.fits
    assert advice(layout, can_recompute=False).startswith("exact=false")
    assert layouts(needs, Cards(8, 8 * GIB), 8, 1, exact=True)[0].fits
