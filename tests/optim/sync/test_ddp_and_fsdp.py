"""ddp and fsdp on real ranks, which run `ranks_ddp_and_fsdp.py`."""

import pytest

from tests.ranks import check_ended_well, run_module


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))]
)
def test_shares_types_and_parameters_left_out(world_size):
    check_ended_well(run_module(world_size, "tests.optim.sync.ranks_ddp_and_fsdp"))
