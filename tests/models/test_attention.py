"""Attention by products: the same values as PyTorch's kernel, to the rounding of the dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from models import attention

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": lambda x: attention.attention(x, 0.5 * x, x + 1, causal=True),
    "to all": lambda x: attention.attention(x, 0.5 * x, x + 1),
    "by scores": lambda x: attention.attention(x, 0.5 * x, x + 1, mask=x[..., :6].mean(0)),
    "within documents": lambda x: attention.attention_within(x, 0.5 * x, x + 1, [2, 4, 1, 5]),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_autograd(kind: str, dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 3, 6, 16).to(dtype), torch.randn(2, 3, 6, 16).to(dtype)
    results = []
    for precision in (dtype, torch.float64):
        leaf = x.detach().to(precision).requires_grad_()
        y = FUNCTIONS[kind](leaf)
        y.backward(grad.to(precision))
        assert y.dtype == precision
        results.append((y, leaf.grad))
    step = torch.finfo(dtype).eps
    for mine, exact in zip(*results, strict=True):
        assert_close(mine.double(), exact, rtol=2 * step, atol=2 * step)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x = torch.randn(2, 3, 6, 16).bfloat16().requires_grad_()
    mixed = attention.attention(x, x, x, causal=True)
    (first,) = torch.autograd.grad(mixed.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("dtype", "positions"), [(torch.float32, 193), (torch.bfloat16, 129), (torch.bfloat16, 257)]
)
def test_long_causal_attention_by_blocks_is_that_of_float64(
    dtype: torch.dtype, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.randn(4, 2, 3, positions, 16).to(dtype)
    taken, apply = [], attention.Attend.apply
    monkeypatch.setattr(
        attention.Attend, "apply", lambda *given: (taken.append(given), apply(*given))[1]
    )
    results = []
    for kind in (dtype, torch.float64):
        query, key, value = (x.to(kind).requires_grad_() for x in inputs[:3].clone())
        mixed = attention.attention(query, key, value, causal=True)
        mixed.backward(inputs[3].to(kind))
        results.append((mixed, query.grad, key.grad, value.grad))
    assert len(taken) == 1, "float64 goes through PyTorch's kernel"
    step = 8 * torch.finfo(dtype).eps
    for mine, exact in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert_close(mine.double(), exact, rtol=step, atol=step)
