"""The GPUs that a plan is for, which are all alike, or shares of a host without GPUs."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from dataclasses import dataclass

import torch

from utils.command.root import Config
from utils.measure import hardware
from utils.ranks.devices import devices_of
from utils.ranks.distributed import Dist

GIB = 2**30
# What is not counted: the memory of the driver and of libraries' workspaces, and gaps between
# tensors
DRIVER, UNUSED = 0.75 * GIB, 0.08
HOST_SHARE = 0.8  # of a machine's memory, where there is no GPU


@dataclass(frozen=True)
class Cards:
    """Equal GPUs, or ranks' equal shares of hosts without GPUs."""

    number: int
    bytes: int  # of each
    name: str = "GPU"
    is_gpu: bool = True

    @property
    def room(self) -> int:
        """The bytes that tensors may take on each."""
        if not self.is_gpu:
            return int(self.bytes * HOST_SHARE)
        return int(max(0.0, self.bytes - DRIVER) * (1 - UNUSED))

    def __str__(self) -> str:
        return f"{self.number} × {self.name} ({gib(self.bytes)})"


def cards_of(dist: Dist) -> Cards:
    """The cards of all ranks, with those that no rank of a host uses. All count as the smallest.

    Called on all ranks together.
    """
    host, is_gpu = socket.gethostname(), dist.device.type == "cuda"
    if is_gpu:
        own = torch.cuda.get_device_properties(dist.device)
        here = (own.total_memory, own.name, f"{host} {own.uuid}", len(devices_of(dist)))
    else:
        here = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "host", host, 1)
    every = [json.loads(text) for text in dist.all_gather_text(json.dumps(here))]
    sharing = Counter(where for _, _, where, _ in every)
    size, name = min((size // sharing[where], name) for size, name, where, _ in every)
    of_each_rank = min(number for *_, number in every)
    return Cards(of_each_rank * len(every), size, name, is_gpu)


def cards_named(text: str) -> Cards:
    """Reads `8x80`: GPUs of this many GiB."""
    number, _, size = text.rpartition("x")
    return Cards(int(number or 1), int(float(size) * GIB))


def forward_dtype(config: Config, device: torch.device) -> str:
    """Returns what `arch.forward_dtype=auto` stands for; a plan for GPUs that are elsewhere counts
    with their type.
    """
    return "bfloat16" if config.plan_cards else hardware.forward_dtype(device)


def gib(count: float) -> str:
    """Bytes as people read them."""
    return next(
        f"{count / size:.1f} {unit}"
        for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if count >= 0.1 * size or size == 2**10
    )
