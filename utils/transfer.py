"""Copies between host and device without waiting, and from what was saved into what lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from pinned memory: from ordinary memory, the host would wait for all work so
    far.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Start to copy a few numbers. What is returned gives them, and waits for the copy, not for
    what the device was given since.
    """
    copy = tensor.to("cpu", non_blocking=True, copy=True)  # into pinned memory
    if not tensor.is_cuda:
        return copy.tolist
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read


@torch.no_grad()
def fill(tensor: Tensor, saved: Mapping[str, Tensor], name: str) -> None:
    """Copies a saved tensor into a live one. What a checkpoint holds goes there directly: there is
    never a second copy of it.
    """
    read_into = getattr(saved, "read_into", None)
    if read_into is not None:
        read_into(name, tensor)
        return
    assert saved[name].shape == tensor.shape, (name, saved[name].shape, tensor.shape)
    tensor.copy_(saved[name])
