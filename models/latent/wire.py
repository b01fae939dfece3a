"""Latents as they are sent: how many bytes they take, and what arrives."""

# B batch, M latents, W numbers of each

from __future__ import annotations

import torch
from torch import Tensor

from models.layers import widen

LEVELS = {"int8": 127, "int4": 7}
SCALE_BYTES = 2  # of each latent: a float16


def sent(z_BMW: Tensor, way: str) -> Tensor:
    """Returns the latents as they arrive."""
    if way == "float16":
        return z_BMW.half().to(z_BMW.dtype)
    most = LEVELS[way]
    scale = (z_BMW.abs().amax(-1, keepdim=True) / most).half().to(z_BMW.dtype).clamp_min(2**-24)
    return (z_BMW / scale).round().clamp(-most, most) * scale


def size(latents: int, numbers: int, way: str) -> int:
    """In bytes."""
    if way == "float16":
        return 2 * latents * numbers
    bits = 8 if way == "int8" else 4
    return latents * (-(-numbers * bits // 8) + SCALE_BYTES)


def alike(first_BMD: Tensor, second_BMD: Tensor) -> Tensor:
    """By how much the angles between an example's vectors differ in two models, whose widths may
    differ [B].
    """
    cosines = [
        torch.nn.functional.normalize(widen(each), dim=-1) for each in (first_BMD, second_BMD)
    ]
    return torch.stack([each @ each.mT for each in cosines]).diff(dim=0)[0].square().mean((1, 2))
