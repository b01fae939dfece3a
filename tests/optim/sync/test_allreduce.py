"""The all-reduce of gradients, in this process and on ranks (`ranks_allreduce.py`)."""

import pytest
import torch
from torch import nn

from optim.agreement import finite
from optim.sync.allreduce import AllReduce
from tests.ranks import check_ended_well, run_module
from utils.ranks.distributed import Dist


def test_gradients_of_some_parameters_are_clipped_alone():
    named = {name: nn.Parameter(torch.ones(4)) for name in ("gates", "parts", "more")}
    reducer = AllReduce()
    reducer.wrap(nn.ParameterDict(named), Dist())
    with reducer.backward(last=True):
        sum((3 * p).sum() for p in named.values()).backward()
    reducer.finish([1.0])
    assert float(reducer.clip(1.0, ["gates"])) == 6
    assert float(reducer.clip(12.0, ["parts", "more"])) == pytest.approx(72**0.5)
    after = {name: p.grad.norm().item() for name, p in named.items()}
    assert after == pytest.approx({"gates": 1, "parts": 6, "more": 6})


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
