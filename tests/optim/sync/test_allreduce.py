"""The all-reduce of gradients, in this process and on ranks (`ranks_allreduce.py`)."""

import pytest
import torch

from optim.sync.agreement import finite
from tests.ranks import check_ended_well, run_module


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_each_gradient_that_is_not_finite_is_found(bad):
    largest = torch.finfo(torch.float32).max
    grads = [
        torch.tensor([1.0, bad]),
        torch.tensor([-largest, largest]),
        torch.zeros(0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([[bad], [0.0]], dtype=torch.float64),
    ]
    assert finite(grads).tolist() == [0, 1, 1, 1, 0]
    assert finite(grads[2:3]).tolist() == [1]


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))]
)
def test_reducer_sparse_optimizer_and_replicas(world_size):
    ranks = check_ended_well(run_module(world_size, "tests.optim.sync.ranks_allreduce"))
    hashes = {
        line.split()[1]
        for rank in ranks
        for line in rank.stdout.splitlines()
        if line.startswith("table")
    }
    assert len(hashes) == 1, "the table depends on the rank or on the number of ranks"
