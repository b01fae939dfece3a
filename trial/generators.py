"""Sees whether code draws from the global generators, whose numbers depend on the rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from utils.errors import ConfigError


@contextmanager
def untouched(where: str, instead: str, device: torch.device) -> Iterator[None]:
    before = states(device)
    yield
    for name in moved(before, device):
        raise draws(where, name, instead)


def draws(where: str, name: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{where}: draws from the global generator of {name}, which depends on the rank and on what"
        f" ran before; draw from {instead}"
    )


def moved(before: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The states of those generators that have another one than before."""
    return {name: state for name, state in states(device).items() if state != before[name]}


def states(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (users' code may draw from it)
    states = {
        "PyTorch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (kind, np.asarray(keys).tobytes(), *rest),
        "Python": random.getstate(),
    }
    if device.type == "cuda":
        states["CUDA"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states
