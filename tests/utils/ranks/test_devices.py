"""Which GPUs a rank has beside its own."""

from __future__ import annotations

import pytest
import torch

from utils.errors import ConfigError
from utils.ranks.devices import dealt, devices_of
from utils.ranks.distributed import Dist


@pytest.mark.parametrize(
    ("taken", "there", "wanted"),
    [
        ([0], 1, [[0]]),
        ([0], 3, [[0, 1, 2]]),
        ([0, 1], 4, [[0, 2], [1, 3]]),
        ([0, 1], 3, [[0, 2], [1]]),  # hybrid
        ([1], 2, [[1, 0]]),  # device=cuda:1
        ([0, 1, 2], 9, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_every_rank_has_gpus_of_its_own(
    taken: list[int], there: int, wanted: list[list[int]]
) -> None:
    found = [dealt(taken, own, there) for own in taken]
    assert found == wanted
    assert sorted(index for devices in found for index in devices) == list(range(there))


def test_a_cpu_stands_for_any_number_of_devices() -> None:
    assert devices_of(Dist(), 3) == [torch.device("cpu")] * 3


def test_ranks_that_use_all_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = Dist(device=torch.device("cuda", 0))
    assert devices_of(alone) == [torch.device("cuda", 0)]
    with pytest.raises(ConfigError, match=r"^arch.devices=2: 1 ranks use all GPUs of .*; start"):
        devices_of(alone, 2)
