"""What the layers do between matrix products, in half precision: the same values to rounding, in fewer passes over memory.

Matrix products are quick in half precision, and what lies between them then takes half of a step. Where a compiler fuses
operations it does better on its own, and in float32 autograd's own formulas keep the published code's bits.
"""

# B batch, H heads, L positions, K head width

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 1 << 13  # positions × head width: 128 of 64, 256 of 32; for longer ones half precision is quicker


def spares_passes(x: Tensor) -> bool:
    """Whether these functions are for this tensor."""
    return x.dtype.itemsize == 2 and not torch.compiler.is_compiling()


def in_order(x: Tensor) -> Tensor:
    """Copied into the order of its dimensions: what lies across takes five to ten times as long to add and to sum."""
    return x.contiguous() if spares_passes(x) else x


def attention(query_BHLK: Tensor, key_BHLK: Tensor, value_BHLK: Tensor, **how: Any) -> Tensor:
    """PyTorch's fused kernel; in float32 for short sequences on a CPU, where it takes two to seven times as long in half precision."""
    dtype = query_BHLK.dtype
    if dtype.itemsize == 2 and query_BHLK.device.type == "cpu" and key_BHLK[0, 0].numel() <= SHORT:
        query_BHLK, key_BHLK, value_BHLK = query_BHLK.float(), key_BHLK.float(), value_BHLK.float()
    return F.scaled_dot_product_attention(query_BHLK, key_BHLK, value_BHLK, **how).to(dtype)


class Norm(torch.autograd.Function):
    """Division by the root mean square, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(size.square_().div_(x.shape[-1]).add_(eps))
        y = wide.mul_(scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        y, scale = ctx.saved_tensors
        wide, wide_y = grad.contiguous().float(), y.float()
        along = torch.linalg.vecdot(wide, wide_y).div_(y.shape[-1]).unsqueeze(-1)
        return wide.addcmul_(wide_y, along, value=-1).mul_(scale).to(y.dtype), None


class Rotate(torch.autograd.Function):
    """Rotary positions; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x_K: Tensor, cos_K: Tensor, sin_K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_K, sin_K)
        return _turned(x_K, cos_K, sin_K, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_K, sin_K = ctx.saved_tensors
        return _turned(grad, cos_K, sin_K, -1), None, None


def _turned(x_K: Tensor, cos_K: Tensor, sin_K: Tensor, direction: int) -> Tensor:
    (cos, _), (sin, _) = cos_K.chunk(2, dim=-1), sin_K.chunk(2, dim=-1)  # both halves are alike
    first, second = x_K.float().chunk(2, dim=-1)
    turned = torch.empty_like(x_K)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    turned_first.copy_((first * cos).addcmul_(second, sin, value=-direction))
    turned_second.copy_((second * cos).addcmul_(first, sin, value=direction))
    return turned
