"""Norms, rotations and gates with backward passes written by hand, for eager code on a CPU.

In float32 and float64 every number is computed by the operations that autograd uses, in its order,
so that the bits are the same; temporaries are reused, and gradients of a fused matrix's parts are
written where they belong instead of being concatenated. `halves.py` does the same for half
precision, where intermediate results need not be rounded.
"""

# B batch, L positions, N heads of queries, keys and values, H of queries and keys, K head width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


def applies(x: Tensor) -> bool:
    """Returns whether a tensor should go through these functions."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class Norm(torch.autograd.Function):
    """Divides by the root mean square. What else reads `x` adds its gradient to this one's sum,
    while autograd's formula would add two terms in turn: `NormBeside` has those bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        square = x.square()
        scale = square.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        return torch.mul(x, scale, out=square)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:  # type: ignore[override]
        return _unnormed(grad, *ctx.saved_tensors), None


class NormBeside(torch.autograd.Function):
    """Returns `x` as it is, for a residual, and its weighted norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        square = x.square()
        scale = square.mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = torch.mul(x, scale, out=square)
        ctx.save_for_backward(x, scale, weight, normed)
        return x, normed * weight

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> Grads:  # type: ignore[override]
        x, scale, weight, normed = ctx.saved_tensors
        product = grad * normed
        of_weight = product.sum_to_size(weight.shape)
        return _unnormed(torch.mul(grad, weight, out=product), x, scale, beside), of_weight, None


class Gated(torch.autograd.Function):
    """silu(gate) * up, for both in one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        opened = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, opened = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        of_gate, of_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, opened, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return grad_x


class Heads(torch.autograd.Function):
    """Splits a fused matrix's output into queries, keys and values; turns queries and keys by their
    positions, then norms them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BLNK: Tensor,
        heads: tuple[int, int],
        cos_K: Tensor | None,
        sin_K: Tensor | None,
        eps: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        both = sum(heads)
        mixed_BLHK, value = x_BLNK[:, :, :both], x_BLNK[:, :, both:]
        half = x_BLNK.dtype.itemsize == 2
        if half:
            mixed_BLHK = mixed_BLHK.float()
        if cos_K is not None and sin_K is not None:
            mixed_BLHK = _turned(mixed_BLHK, cos_K, sin_K, 1)
        saved: tuple[Tensor, ...] = ()
        if eps is not None:
            square = mixed_BLHK.square()
            scale = square.mean(-1, keepdim=True).add_(eps).rsqrt_()
            saved = (mixed_BLHK, scale)
            mixed_BLHK = torch.mul(mixed_BLHK, scale, out=square)
        mixed_BLHK = mixed_BLHK.to(x_BLNK.dtype)
        if half and saved:  # the product in half precision is enough to go back
            saved = (mixed_BLHK, saved[1])
        ctx.save_for_backward(cos_K, sin_K, *saved)
        ctx.sizes = x_BLNK.shape, both
        query, key = mixed_BLHK.split(heads, dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_query: Tensor, of_key: Tensor, of_value: Tensor
    ) -> Grads:
        (cos_K, sin_K, *saved), (shape, both) = ctx.saved_tensors, ctx.sizes
        grad_x = of_value.new_empty(shape)
        grad_x[:, :, both:].copy_(of_value.transpose(1, 2))
        grad = torch.cat((of_query.transpose(1, 2), of_key.transpose(1, 2)), dim=2)
        half = grad.dtype.itemsize == 2
        if half:
            grad = grad.float()
        if saved:
            grad = _halves_unnormed(grad, *saved) if half else _unnormed(grad, *saved)
        if cos_K is None or sin_K is None:
            grad_x[:, :, :both].copy_(grad)
        elif half:
            grad_x[:, :, :both].copy_(_turned(grad, cos_K, sin_K, -1))
        else:
            _turned(grad, cos_K, sin_K, -1, grad_x[:, :, :both])
        return grad_x, None, None, None, None


def _unnormed(grad: Tensor, x: Tensor, scale: Tensor, beside: Tensor | None = None) -> Tensor:
    """Returns the gradient of x * rsqrt(mean(x²) + eps), added to that `beside` it, rounded as
    autograd does; `addcmul` rounds once less.
    """
    product = grad * x
    along = product.sum(-1, keepdim=True)
    share = along.mul_(-0.5).mul_(scale.pow(3)).div_(x.shape[-1]).mul_(2)
    grad_x = torch.mul(grad, scale)
    if beside is not None:
        grad_x.add_(beside)
    return grad_x.add_(torch.mul(x, share, out=product))


def _halves_unnormed(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    wide_y = y.float()
    along = torch.linalg.vecdot(grad, wide_y).div_(y.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(wide_y, along, value=-1).mul_(scale)


def _turned(
    x_BLHK: Tensor, cos_K: Tensor, sin_K: Tensor, direction: int, out: Tensor | None = None
) -> Tensor:
    """Repeats the angles for each head: a loop over one head's few numbers takes longer."""
    heads = x_BLHK.shape[2]
    half = sin_K[..., : sin_K.shape[-1] // 2] * direction  # both halves are alike
    cos, sin = (
        angles.unsqueeze(-2).expand(*angles.shape[:-1], heads, -1).contiguous()
        if angles.ndim == 2
        else angles.transpose(1, 2).expand(-1, -1, heads, -1).contiguous()
        for angles in (cos_K, torch.cat((-half, half), dim=-1))
    )
    first, second = x_BLHK.chunk(2, dim=-1)
    crossed = torch.cat((second, first), dim=-1).mul_(sin)
    return torch.mul(x_BLHK, cos, out=out).add_(crossed)
