"""In half precision, a net that is not compiled keeps what products read and give, and the same
bits.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from models.layers import RMSNorm, SwiGLU, rms_norm

HALF = [torch.bfloat16, torch.float16]


def by_autograd(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def kept(call: Callable[[], object]) -> int:
    """Returns the bytes that the graph of a call holds."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor  # which keeps its address, too
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_norm_has_the_bits_of_autograd(
    dtype: torch.dtype, weighted: bool, transposed: bool
) -> None:
    numbers, grad = torch.randn(3, 50, 50).to(dtype), torch.randn(3, 50, 50).to(dtype)
    results = []
    for norm in (rms_norm, by_autograd):
        x, weight = numbers.clone().requires_grad_(), torch.linspace(0.5, 2, 50).requires_grad_()
        y = norm(x.mT if transposed else x, 1e-5, weight.to(dtype) if weighted else None)
        y.backward(grad)
        results.append((y, x.grad, weight.grad))
    for mine, autograds in zip(*results, strict=True):
        assert_close(mine, autograds, rtol=0, atol=0)


def test_a_norm_can_be_differentiated_twice() -> None:
    numbers, seconds = torch.randn(4, 8).bfloat16(), []
    for norm in (rms_norm, by_autograd):
        x, weight = numbers.clone().requires_grad_(), torch.linspace(0.5, 1, 8).bfloat16()
        (first,) = torch.autograd.grad(norm(x, 1e-5, weight).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.float().pow(3).sum(), x)[0])
    assert_close(*seconds, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", HALF)
def test_a_norm_keeps_its_input_as_it_is(dtype: torch.dtype) -> None:
    x, norm = torch.randn(10, 64).to(dtype).requires_grad_(), RMSNorm(64, 1e-5)
    of_x, of_weight, of_scale = 2 * 10 * 64, 2 * 64, 4 * 10
    assert kept(lambda: norm(x)) == of_x + of_weight + of_scale


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_a_gated_mlp_keeps_what_products_read_and_give(eps: float | None) -> None:
    with torch.device("meta"):
        mlp = SwiGLU(64, 32, eps).bfloat16()
        x = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
        # the input, both halves and their product; the first matrix and the second
        expected = 2 * 1000 * (64 + 2 * 32 + 32) + 2 * 64 * (2 * 32 + 32)
        assert kept(lambda: mlp(x)) == expected


def test_a_norm_is_compiled_whole() -> None:
    x, norm = torch.randn(10, 64).bfloat16().requires_grad_(), RMSNorm(64, 1e-5)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert_close(compiled(x), norm(x), rtol=0, atol=0)
