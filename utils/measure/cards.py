"""The GPUs that a plan counts with: how many, how much memory, and which kernels they have."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from utils.gpus import gib_of_each
from utils.measure.hardware import WITHOUT_BFLOAT16
from utils.ranks.distributed import Dist

GIB = 2**30
# What is not counted: the driver's own memory with the libraries' workspaces, and what lies unused
# between tensors
DRIVER, UNUSED = 0.75 * GIB, 0.08
HOST_SHARE = 0.8  # of a machine's memory, where there is no GPU
WITHOUT_FLASH = re.compile(r"V100|\bT4\b|P100|RTX 20|Quadro RTX|TITAN")


@dataclass(frozen=True)
class Card:
    """One GPU, or a rank's share of a host without GPUs."""

    name: str
    bytes: int
    is_gpu: bool = True

    @property
    def room(self) -> int:
        """The bytes that tensors may take."""
        return (
            int(max(0.0, self.bytes - DRIVER) * (1 - UNUSED))
            if self.is_gpu
            else int(self.bytes * HOST_SHARE)
        )

    def __str__(self) -> str:
        return f"{self.name} ({gib(self.bytes)})"


def smallest(cards: Sequence[Card]) -> Card:
    """The card with the least memory, which decides: all ranks compute equally much."""
    return min(cards, key=lambda card: card.room)


def cards_of(dist: Dist) -> list[Card]:
    """Each rank's card if there are several ranks; else all cards of this machine."""
    host = socket.gethostname()
    if dist.device.type != "cuda":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        mine = [("host", memory, host)]
    else:
        indices = (
            [dist.device.index or 0] if dist.world_size > 1 else range(torch.cuda.device_count())
        )
        mine = [
            (each.name, each.total_memory, f"{host} {each.uuid}")
            for each in map(torch.cuda.get_device_properties, indices)
        ]
    every = [
        tuple(one) for text in dist.all_gather_text(json.dumps(mine)) for one in json.loads(text)
    ]
    sharing = Counter(where for _, _, where in every)
    return [
        Card(name, count // sharing[where], dist.device.type == "cuda")
        for name, count, where in every
    ]


def cards_named(text: str) -> list[Card]:
    """Parses `8x80` or `2x80+24`: GPUs of this many GiB."""
    return [Card("GPU", int(gib * GIB)) for gib in gib_of_each(text)]


def gib(count: float) -> str:
    """Bytes as people read them."""
    return next(
        f"{count / size:.1f} {unit}"
        for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if count >= 0.1 * size or size == 2**10
    )


def precision(card: Card, dtype: str) -> str:
    if dtype == "float32":
        return "products in TF32 where the GPU has it" if card.is_gpu else ""
    return (
        f"{card.name} has none of its own, it is slow there"
        if dtype == "bfloat16" and WITHOUT_BFLOAT16.search(card.name)
        else ""
    )


def attention(card: Card, dtype: str) -> tuple[str, str]:
    if not card.is_gpu or dtype == "float64":
        return "PyTorch's", ""
    if dtype in ("bfloat16", "float16") and not WITHOUT_FLASH.search(card.name):
        return "flash", "one kernel, which keeps no scores"
    return (
        "memory-efficient",
        "one kernel, which keeps no scores; flash wants bfloat16 and a GPU of Ampere's age",
    )
