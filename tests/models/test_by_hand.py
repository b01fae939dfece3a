"""Backward passes written by hand have the bits of autograd's, and half precision its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import by_hand, layers

EPS = 1e-5
HEADS = (4, 2)
SHAPES = [(2, 7, 16), (3, 5, 8), (1, 64, 32)]  # batch, positions, width of a head
Outputs = tuple[Tensor, ...]


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def turned(x: Tensor, angles: layers.CosSin) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]


def heads(x: Tensor, angles: layers.CosSin | None, eps: float | None) -> Outputs:
    query, key, value = x.transpose(1, 2).split((*HEADS, HEADS[1]), dim=1)
    if angles is not None:
        query, key = turned(query, angles), turned(key, angles)
    return (query, key, value) if eps is None else (normed(query), normed(key), value)


def results(function: Callable[..., Outputs], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    torch.manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(y.shape).bfloat16().to(y.dtype) for y in outputs])
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same_bits(
    mine: Callable[..., Outputs], autograd: Callable[..., Outputs], *inputs: Tensor
) -> None:
    pairs = list(zip(results(mine, inputs), results(autograd, inputs), strict=True))
    assert len(pairs) > len(inputs)
    for one, other in pairs:
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_gates_have_the_bits_of_autograd(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)

    def gated(both: Tensor) -> Outputs:
        gate, up = both.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    def added(x: Tensor, normed: Tensor) -> Outputs:
        return (x + normed.tanh(),)

    assert_same_bits(lambda x: (by_hand.Norm.apply(x, EPS),), lambda x: (normed(x),), x)
    assert_same_bits(
        lambda x, w: added(*by_hand.NormBeside.apply(x, w, EPS)),
        lambda x, w: added(x, normed(x) * w),
        x,
        weight,
    )
    assert_same_bits(lambda x: (by_hand.Gated.apply(x),), gated, x)


@pytest.mark.parametrize("eps", [EPS, None])
@pytest.mark.parametrize("positions", ["none", "in order", "given"])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_have_the_bits_of_autograd(
    shape: tuple[int, int, int], positions: str, eps: float | None
) -> None:
    batch, length, width = shape
    angles: layers.CosSin | None = layers.RotaryEmbedding(width, 0, length, 10000.0)()
    if positions == "given":  # by row, as texts that begin at other places need
        cos, sin = layers.RotaryEmbedding(width, 0, 2 * length, 10000.0)()
        places = torch.randint(2 * length, (batch, length))
        angles = cos[places].unsqueeze(1), sin[places].unsqueeze(1)
    if positions == "none":
        angles = None
    x = torch.randn(batch, length, HEADS[0] + 2 * HEADS[1], width)
    assert_same_bits(
        lambda x: by_hand.Heads.apply(x, HEADS, *(angles or (None, None)), eps),
        lambda x: heads(x, angles, eps),
        x,
    )


@pytest.mark.parametrize("eps", [EPS, None])
def test_heads_in_half_precision_are_those_of_float64(eps: float | None) -> None:
    angles = layers.RotaryEmbedding(16, 0, 6, 10000.0)()
    x = torch.randn(2, 6, HEADS[0] + 2 * HEADS[1], 16).bfloat16()
    mine = results(lambda x: by_hand.Heads.apply(x, HEADS, *angles, eps), [x])
    exact = results(lambda x: heads(x, angles, eps), [x.double()])
    step = torch.finfo(torch.bfloat16).eps
    for one, other in zip(mine, exact, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2 * step, atol=2 * step)


def test_a_net_on_a_cpu_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler sees operations that it can fuse."""
    assert by_hand.applies(torch.ones(1))
    assert not by_hand.applies(torch.ones(1, device="meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not by_hand.applies(torch.ones(1))
