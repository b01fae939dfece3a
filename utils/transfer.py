"""Copies between host and device without waiting, and from saved tensors into live ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device by way of pinned memory: from other memory, the host would wait
    for all work on the device.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def batch_to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies every tensor of a batch to a device, in float64 if a run computes in it."""
    if torch.get_default_dtype() == torch.float64:
        batch = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in batch.items()
        }
    return {name: to_device(tensor, device) for name, tensor in batch.items()}


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest type of floating-point numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(tensor: Tensor) -> Tensor:
    """Converts numbers to the widest type of their device."""
    return tensor.to(widest(tensor.device))


def local(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor as a plain tensor; other tensors as they are."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def fill(tensor: Tensor, saved: Tensor) -> None:
    """Copies a saved tensor into a live one, of which both may be this rank's rows."""
    live = local(tensor)
    assert saved.shape == live.shape, (saved.shape, live.shape)
    live.copy_(saved)
