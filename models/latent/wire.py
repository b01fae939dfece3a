"""How latents are sent: rounding, and size in bytes."""

# B batch, M latents, W numbers of each

from __future__ import annotations

import torch
from torch import Tensor

from models.layers import widen

LEVELS = {"int8": 127, "int4": 7}
SCALE_BYTES = 2  # a float16 for each latent


def rounded(z_BMW: Tensor, way: str) -> Tensor:
    """Returns the latents as they arrive, rounded."""
    if way == "float16":
        return z_BMW.half().to(z_BMW.dtype)
    most = LEVELS[way]
    scale = (z_BMW.abs().amax(-1, keepdim=True) / most).half().to(z_BMW.dtype).clamp_min(2**-24)
    return (z_BMW / scale).round().clamp(-most, most) * scale


def size(latents: int, numbers: int, way: str) -> int:
    """Returns the size in bytes of so many latents, each of so many numbers."""
    if way == "float16":
        return 2 * latents * numbers
    bits = 8 if way == "int8" else 4
    return latents * (-(-numbers * bits // 8) + SCALE_BYTES)


def cosine_gap(first_BMD: Tensor, second_BMD: Tensor) -> Tensor:
    """Returns the mean squared difference between the cosines of an example's vectors in one model
    and in another [B]. The models may have different widths.
    """
    cosines = [
        torch.nn.functional.normalize(widen(each), dim=-1) for each in (first_BMD, second_BMD)
    ]
    return torch.stack([each @ each.mT for each in cosines]).diff(dim=0)[0].square().mean((1, 2))
