"""Metrics are sums and counts. What several ranks make of them is in test_distributed.py."""

import pytest
import torch

from utils.measure.metrics import Meter
from utils.ranks.distributed import Dist


def pair(total: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(total), torch.tensor(count)


def test_sums_of_many_small_steps_stay_exact() -> None:
    meter = Meter()
    meter.add({"a": pair(2.0**24, 2**24)})
    for _ in range(3):
        meter.add({"a": pair(1.0, 1)})  # float32 would swallow these
    assert meter.read(Dist()) == {"a": 1.0}
    meter.add({"a": pair(2.0**24, 1)})
    for _ in range(3):
        meter.add({"a": pair(1.0, 0)})
    assert meter.read(Dist()) == {"a": 2.0**24 + 3}


def test_sums_that_other_code_saved_are_forgotten() -> None:
    meter, three = Meter(2), pair(3.0, 2)
    meter.load(
        {shard: {"old": torch.stack(three).double()} for shard in (0, 1)}, torch.device("cpu")
    )
    for shard in (0, 1):
        meter.add({"new": three}, shard)
    assert meter.read(Dist()) == {"new": 1.5}
    meter.add({"new": three})
    with pytest.raises(AssertionError, match="metrics changed"):
        meter.add({"old": three})
