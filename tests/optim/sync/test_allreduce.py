"""The all-reduce of gradients, in this process and on ranks (`ranks_allreduce.py`)."""

import re

import pytest
import torch

from optim.sync.base import norms_of
from tests.ranks import check_ended_well, run_module


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_each_gradient_that_is_not_finite_is_found(bad):
    grads = [
        torch.tensor([1.0, bad]),
        torch.tensor([1e18, -1e18]),
        torch.zeros(0),
        torch.full((2,), 6e4, dtype=torch.float16),  # whose square is too large for its type
        torch.tensor([[bad], [0.0]], dtype=torch.float64),
    ]
    assert torch.stack([*norms_of(grads)]).isfinite().tolist() == [False, True, True, True, False]
    assert [float(norm) for norm in norms_of(grads[2:4])] == [0, pytest.approx(8.485e4, rel=1e-3)]


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))]
)
def test_reducer_sparse_optimizer_and_replicas(world_size):
    ranks = check_ended_well(run_module(world_size, "tests.optim.sync.ranks_allreduce"))
    said = "".join(rank.stdout for rank in ranks)
    hashes = {*re.findall(r"^table\S* (\S+)", said, re.MULTILINE)}
    assert len(hashes) == 1, "the table depends on the rank or on the number of ranks"
