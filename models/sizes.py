"""Bounds of sizes: a net that cannot be built is refused before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from utils.errors import ConfigError

LAYERS = 1000
WIDTH = 1 << 20
GIB = 1 << 30


def check_sizes(most: Mapping[str, int], values: Mapping[str, float | None]) -> None:
    """Raises ConfigError for the first key under `arch` that is more than its bound."""
    for key, bound in most.items():
        value = values[key]
        if value is not None and value > bound:
            raise ConfigError(f"arch.{key}={value}: must be at most {bound}")


def check_count(key: str, value: object, most: int) -> None:
    """Raises ConfigError unless a value under `arch` is a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"arch.{key}={value}: must be a whole number from 1 to {most}")


def check_memory(weights: int) -> None:
    """Raises ConfigError if this many weights do not fit into this machine's memory.

    Weights are drawn on the CPU for every device. A net without numbers, on the meta device, may
    have any size.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.get_default_device().type != "meta" and 4 * weights > memory:
        raise ConfigError(
            f"arch: a net with {weights:,} weights needs {4 * weights / GIB:,.0f} GiB, and this"
            f" machine has {memory / GIB:,.0f}; choose smaller sizes"
        )
