"""Which GPUs a rank has beside its own, and which model lies on which."""

from __future__ import annotations

import pytest

from utils.errors import ConfigError
from utils.ranks.devices import home, pick_devices


@pytest.mark.parametrize(
    ("taken", "there", "count", "wanted"),
    [
        ([0], 1, 1, [[0]]),
        ([0], 2, 2, [[0, 1]]),
        ([0, 1], 4, 2, [[0, 2], [1, 3]]),
        ([0, 1], 5, 2, [[0, 2], [1, 3]]),
        ([0], 3, 3, [[0, 1, 2]]),
        ([1], 2, 2, [[1, 0]]),  # device=cuda:1
        ([0, 1, 2], 9, 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_every_rank_has_gpus_of_its_own(
    taken: list[int], there: int, count: int, wanted: list[list[int]]
) -> None:
    devices = [pick_devices(taken, mine, there, count) for mine in taken]
    assert devices == wanted
    assert len({index for each in devices for index in each}) == count * len(taken)


def test_too_few_gpus_are_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^arch.devices=2: 2 ranks of a host need 4 GPUs, and there are 3; start fewer ranks,"
            r" or give"
        ),
    ):
        pick_devices([0, 1], 0, 3, 2)


@pytest.mark.parametrize(
    ("models", "devices", "wanted"),
    [(1, 1, [0]), (2, 1, [0, 0]), (2, 2, [0, 1]), (2, 3, [1, 2]), (3, 2, [1, 0, 1]), (1, 2, [1])],
)
def test_what_trains_has_the_first_device_to_itself_where_there_are_enough(
    models: int, devices: int, wanted: list[int]
) -> None:
    assert [home(number, models, devices) for number in range(models)] == wanted
