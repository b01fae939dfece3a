"""Attention on a CPU: by products where they are faster than PyTorch's fused kernel, in half
precision and, over long sequences, in float32.
"""

# B batch, H heads, L positions, K head width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# positions × head width, such as 128 × 64; for longer sequences half precision is faster
SHORT = 1 << 13
# bytes of scores that attention may keep for its backward pass
FEW = 1 << 25
# causal attention by products: so many positions at once. Larger blocks compute more scores that
# masks hide, and products of smaller ones are slower
BLOCK = {torch.bfloat16: 128, torch.float32: 64}


def attention(
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    shared_keys: bool = False,
) -> Tensor:
    """Calls PyTorch's fused kernel, or on a CPU computes by products where they are faster.

    In `experiment=lm` on one core of an EPYC, forward and backward, the kernel takes 2.0 times as
    long as products in bfloat16, and 1.2 times in float32 (torch 2.13); elsewhere 1.1 to 10 times
    in bfloat16, where the shorter sequences gain most. Where products do not suit, short sequences
    of half precision are computed in float32.

    `mask` says what each position sees (bool), or what is added to its scores (float); with
    `shared_keys`, there are fewer heads of keys and values than of queries.
    """
    dtype = query_BHLK.dtype
    if mask is None and not shared_keys and _suits_products(query_BHLK, key_BHLK, causal):
        return Attend.apply(query_BHLK, key_BHLK, value_BHLK, causal)
    # the kernel is slow in half precision on a CPU, so that short sequences pay for the conversion
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
    # the rows of the batch joined into one sequence, then cut into documents
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


def _suits_products(query_BHLK: Tensor, key_BHLK: Tensor, causal: bool) -> bool:
    """Products were measured to be faster in these cases, and their scores fit into `FEW`."""
    batch, heads, length, _ = query_BHLK.shape
    dtype = query_BHLK.dtype
    if not (
        dtype in BLOCK
        and query_BHLK.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and key_BHLK.shape[2] == length > 1
    ):
        return False
    # the kernel is as fast over short sequences in float32, and has the published code's bits
    if dtype == torch.float32 and not (causal and length > 2 * BLOCK[dtype]):
        return False
    seen = sum(rows.stop * (rows.stop - rows.start) for rows in _blocks(length, dtype, causal))
    return batch * heads * seen * dtype.itemsize <= FEW


def _blocks(length: int, dtype: torch.dtype, causal: bool) -> list[slice]:
    """Returns the positions whose scores are computed together: all, unless attention is causal."""
    size = BLOCK[dtype] if causal else length
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class Attend(torch.autograd.Function):
    """Attention by batched products, with the scores in memory. If it is causal, each block of
    positions reads the keys up to its own end.
    """

    @staticmethod
    def forward(
        ctx: Any, query_BHLK: Tensor, key_BHLK: Tensor, value_BHLK: Tensor, causal: bool
    ) -> Tensor:
        # batched products take three dimensions, so heads of all rows lie in one
        query, key, value = (x.flatten(0, 1) for x in (query_BHLK, key_BHLK, value_BHLK))
        length, ctx.scale = query.shape[1], query.shape[2] ** -0.5
        ctx.blocks = _blocks(length, query.dtype, causal)
        kept, mixed = [], []
        for rows in ctx.blocks:
            hidden = query.new_zeros(rows.stop - rows.start, rows.stop)
            # minus infinity where a key comes later; `baddbmm` adds it to the scores for free
            if causal:
                hidden = hidden.fill_(-torch.inf).triu_(1 + rows.start)
            scores = torch.baddbmm(
                hidden,
                query[:, rows],
                key[:, : rows.stop].transpose(1, 2),
                beta=int(causal),
                alpha=ctx.scale,
            )
            # the probabilities are kept: the backward pass would otherwise compute all scores again
            kept.append(torch.softmax(scores, dim=-1))
            mixed.append(torch.bmm(kept[-1], value[:, : rows.stop]))
        ctx.save_for_backward(query, key, value, *kept)
        return _joined(mixed).view_as(query_BHLK)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_BHLK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *kept = ctx.saved_tensors
        grad_mixed = grad_BHLK.flatten(0, 1)
        grads_query: list[Tensor] = []
        grad_key = grad_value = None
        # from the last block, whose gradients cover every key, so that earlier ones add to them in
        # place
        for rows, shares in zip(reversed(ctx.blocks), reversed(kept), strict=True):
            seen = slice(rows.stop)
            # back through the values and the softmax to this block's scores
            grad_shares = torch.bmm(grad_mixed[:, rows], value[:, seen].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_shares, shares, -1, shares.dtype)
            grads_query.insert(0, _product(grad_scores, key[:, seen], ctx.scale))
            # this block's contribution to the keys and values that it sees
            key_here = _product(grad_scores.transpose(1, 2), query[:, rows], ctx.scale)
            value_here = torch.bmm(shares.transpose(1, 2), grad_mixed[:, rows])
            if grad_key is None or grad_value is None:  # the last block sees all keys
                grad_key, grad_value = key_here, value_here
                if len(kept) > 1:  # in half precision, a sum would round for each block
                    grad_key, grad_value = grad_key.float(), grad_value.float()
            else:
                grad_key[:, seen] += key_here
                grad_value[:, seen] += value_here
        assert grad_key is not None
        assert grad_value is not None
        grads = _joined(grads_query), grad_key.to(key.dtype), grad_value.to(key.dtype)
        grad_query, grad_key, grad_value = (grad.view(grad_BHLK.shape) for grad in grads)
        return grad_query, grad_key, grad_value, None


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    return torch.baddbmm(left.new_zeros(()), left, right, beta=0, alpha=factor)


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
