"""Each way to synchronise on real ranks, which run `ranks_ddp_and_fsdp.py`."""

import pytest

from tests import ranks
from tests.ranks import check_ended_well, run_module

MODULE = "tests.optim.sync.ranks_ddp_and_fsdp"


@pytest.mark.parametrize(
    ("world_size", "which"),
    [(2, ["few"]), *(pytest.param(ranks, [], marks=pytest.mark.slow) for ranks in (1, 2, 3, 4))],
)
def test_every_way_trains_as_one_process_does(world_size, which, monkeypatch):
    if not which:
        monkeypatch.setattr(ranks, "forks", None)  # a fork has read TORCH_CPP_LOG_LEVEL already
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # DDP remarks that it searches for what is not there
    for rank in check_ended_well(run_module(world_size, MODULE, *which, timeout=150, env=quiet)):
        assert rank.stderr == "", "no warnings"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_compiled_nets_train_alike():
    check_ended_well(run_module(2, MODULE, "compiled", timeout=400))
