"""Norms, rotations and attention in half precision, in fewer passes over memory.

Matrix products are fast in half precision, so the operations between them take half of a step. The
functions here give the same values up to rounding. A compiler does better on its own, and in
float32 autograd's formulas keep the published code's bits.
"""

# B batch, H heads, L positions, K head width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# positions × head width, such as 128 × 64; for longer sequences half precision is faster
SHORT = 1 << 13
# positions × positions of all heads: more scores than these would take more than 32 MiB
FEW = 1 << 24


def spares_passes(x: Tensor) -> bool:
    """Returns whether a tensor should go through these functions."""
    return x.dtype.itemsize == 2 and not torch.compiler.is_compiling()


def in_order(x: Tensor) -> Tensor:
    """Makes a tensor contiguous: a transposed one takes five to ten times as long to sum."""
    return x.contiguous() if spares_passes(x) else x


def attention(
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    shared_keys: bool = False,
) -> Tensor:
    """Calls PyTorch's fused kernel, in float32 for short sequences on a CPU.

    There the kernel takes two to seven times as long in half precision. In bfloat16, two batched
    products take half of the time of either, if the scores are few. `mask` says what each
    position sees (bool), or what is added to its scores (float); with `shared_keys`, there are
    fewer heads of keys and values than of queries.
    """
    dtype = query_BHLK.dtype
    if mask is None and not shared_keys and _has_few_scores(query_BHLK, key_BHLK):
        return Attend.apply(query_BHLK, key_BHLK, value_BHLK, causal)
    if dtype.itemsize == 2 and query_BHLK.device.type == "cpu" and key_BHLK[0, 0].numel() <= SHORT:
        query_BHLK, key_BHLK, value_BHLK = query_BHLK.float(), key_BHLK.float(), value_BHLK.float()
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query_BHLK.dtype)  # the kernel takes no other dtype
    mixed_BHLK = F.scaled_dot_product_attention(
        query_BHLK,
        key_BHLK,
        value_BHLK,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=shared_keys,
    )
    return mixed_BHLK.to(dtype)


def attention_within(
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    lengths: Sequence[int],
    shared_keys: bool = False,
) -> Tensor:
    """Attends causally within documents of these lengths, which follow one another through the
    rows of the batch. No mask is made, and nothing computed that one would hide.
    """
    parts = [
        heads_BHLK.transpose(0, 1).flatten(1, 2).split(lengths, dim=1)
        for heads_BHLK in (query_BHLK, key_BHLK, value_BHLK)
    ]
    mixed = [
        attention(query[None], key[None], value[None], None, True, shared_keys)[0]
        for query, key, value in zip(*parts, strict=True)
    ]
    batch, _, length, _ = query_BHLK.shape
    return torch.cat(mixed, dim=1).unflatten(1, (batch, length)).transpose(0, 1)


def _has_few_scores(query_BHLK: Tensor, key_BHLK: Tensor) -> bool:
    batch, heads, length, _ = query_BHLK.shape
    return (
        query_BHLK.dtype == torch.bfloat16
        and query_BHLK.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and key_BHLK.shape[2] == length > 1
        and batch * heads * length * length <= FEW
    )


class Attend(torch.autograd.Function):
    """Attention by batched products, with all scores in memory."""

    @staticmethod
    def forward(
        ctx: Any, query_BHLK: Tensor, key_BHLK: Tensor, value_BHLK: Tensor, causal: bool
    ) -> Tensor:
        query, key, value = (x.flatten(0, 1) for x in (query_BHLK, key_BHLK, value_BHLK))
        length, ctx.scale = query.shape[1], query.shape[2] ** -0.5
        hidden = query.new_zeros(length, length)
        if causal:
            hidden = hidden.fill_(-torch.inf).triu_(1)
        scores = torch.baddbmm(
            hidden, query, key.transpose(1, 2), beta=int(causal), alpha=ctx.scale
        )
        shares = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(query, key, value, shares)
        return torch.bmm(shares, value).view_as(query_BHLK)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_BHLK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, shares = ctx.saved_tensors
        grad = grad_BHLK.flatten(0, 1)
        of_value = torch.bmm(shares.transpose(1, 2), grad)
        of_shares = torch.bmm(grad, value.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
        nothing = grad.new_zeros(())
        of_query = torch.baddbmm(nothing, of_scores, key, beta=0, alpha=ctx.scale)
        of_key = torch.baddbmm(nothing, of_scores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        shape = grad_BHLK.shape
        return of_query.view(shape), of_key.view(shape), of_value.view(shape), None


class Norm(torch.autograd.Function):
    """Divides by the root mean square, computed in float32."""

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
    """Turns by rotary positions; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x_K: Tensor, cos_K: Tensor, sin_K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_K, sin_K)
        return _turn(x_K, cos_K, sin_K, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_K, sin_K = ctx.saved_tensors
        return _turn(grad, cos_K, sin_K, -1), None, None


def _turn(x_K: Tensor, cos_K: Tensor, sin_K: Tensor, direction: int) -> Tensor:
    (cos, _), (sin, _) = cos_K.chunk(2, dim=-1), sin_K.chunk(2, dim=-1)  # both halves are alike
    first, second = x_K.float().chunk(2, dim=-1)
    turned = torch.empty_like(x_K)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    turned_first.copy_((first * cos).addcmul_(second, sin, value=-direction))
    turned_second.copy_((second * cos).addcmul_(first, sin, value=direction))
    return turned
