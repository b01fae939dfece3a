"""Further GPUs of a rank: those that no rank of its host uses."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch

from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def devices_of(dist: Dist, most: int | None = None) -> list[torch.device]:
    """Returns this rank's device, and up to `most` in all with its share of those to spare. On a
    CPU, the same one `most` times.

    Called on all ranks together.
    """
    if dist.device.type != "cuda":
        return [dist.device] * (most or 1)
    if most == 1:
        return [dist.device]
    here, own = socket.gethostname(), dist.device.index or 0
    every = map(json.loads, dist.all_gather_text(json.dumps([here, own])))
    taken = [index for host, index in every if host == here]
    found = dealt(taken, own, torch.cuda.device_count())[:most]
    with dist.agreed():
        if most is not None and torch.cuda.device_count() <= len(taken):
            raise ConfigError(
                f"arch.devices={most}: {len(taken)} ranks use all GPUs of {here}; start fewer"
                " ranks, or leave it out"
            )
    return [torch.device("cuda", index) for index in found]


def dealt(taken: Sequence[int], own: int, there: int) -> list[int]:
    """Returns the devices of the rank whose own is `own`. `taken` are those of all ranks of a host
    with so many; the others are dealt out.
    """
    spare = [index for index in range(there) if index not in taken]
    return [own, *spare[sorted(taken).index(own) :: len(taken)]]
