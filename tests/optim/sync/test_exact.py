"""The fixed tree, and what a rank may add up on its way through it. With several ranks:
ranks_allreduce.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.sync.allreduce import ExactAllReduce, merges_after_each, tree_sum
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
            with reducer.backward(last=shard == 3):
                ((a if shard % 2 else b).sum() * (shard + 1)).backward()
        assert reducer.finish([1.0] * 4) == 4.0
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.tolist() == [6 / 4] * 3
        assert b.grad.tolist() == [4 / 4] * 3
