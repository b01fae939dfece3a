"""Further GPUs of a rank: which they are, and which of its frozen models lies on which."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch

from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def devices_of(dist: Dist, count: int) -> list[torch.device]:
    """Returns this rank's device and further ones that no rank of its host uses, `count` in all.

    Called on all ranks together.
    """
    if dist.device.type != "cuda" or count == 1:
        return [dist.device]
    taken = [index for _, index in _neighbours(dist)]
    with dist.agreed():
        return [
            torch.device("cuda", index)
            for index in pick_devices(taken, dist.device.index, torch.cuda.device_count(), count)
        ]


def most_devices(dist: Dist) -> int:
    """Returns how many devices each rank can have. Called on all ranks together."""
    if dist.device.type != "cuda":
        return 1
    each = torch.cuda.device_count() // len(_neighbours(dist))
    return max(1, min(map(int, dist.all_gather_text(str(each)))))


def _neighbours(dist: Dist) -> list[list]:
    """Returns host and device of each rank on this host."""
    host = socket.gethostname()
    everyone = [
        json.loads(text) for text in dist.all_gather_text(json.dumps([host, dist.device.index]))
    ]
    return [each for each in everyone if each[0] == host]


def pick_devices(taken: Sequence[int], own: int, there: int, count: int) -> list[int]:
    """Returns `count` of a host's `there` devices for the rank whose device is `own`. `taken` are
    the devices of all ranks there.
    """
    if there < count * len(taken):
        raise ConfigError(
            f"arch.devices={count}: {len(taken)} ranks of a host need {count * len(taken)} GPUs,"
            f" and there are {there}; start fewer ranks, or give fewer devices"
        )
    spare = [index for index in range(there) if index not in taken]
    return [own, *spare[sorted(taken).index(own) :: len(taken)]][:count]


def home(number: int, models: int, devices: int) -> int:
    """Returns the device of a frozen model. The last model gets the last device, so what trains
    has the first to itself if there are enough.
    """
    return (number - models) % devices
