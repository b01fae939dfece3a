"""Muon against PyTorch's, and what it makes of matrices."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from optim.muon import Muon, narrowed, orthogonal
from utils.measure import hardware

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(6, 6), (4, 24), (24, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_pytorch_in_another_precision(
    shape: tuple[int, int], nesterov: bool
) -> None:
    start, grads = torch.randn(shape), torch.randn(5, *shape)
    ends, momenta = [], []
    for kind in (Muon, torch.optim.Muon):
        parameter = nn.Parameter(start.clone())
        keys = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "original"}
        optimizer = kind([("w", parameter)], nesterov=nesterov, **keys)
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
        ends.append(parameter.detach())
        momenta.append(optimizer.state[parameter]["momentum_buffer"])
    ours, theirs = ends
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() < 0.05 * moved  # bfloat16 keeps eight bits
    assert torch.allclose(*momenta)


@pytest.mark.parametrize("shape", [(8, 8), (8, 64), (64, 8)])
def test_what_it_makes_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    made = orthogonal(torch.randn(shape, dtype=torch.float64), COEFFICIENTS, 5, 1e-7)
    sizes = torch.linalg.svdvals(made)
    assert made.dtype == torch.float64
    assert 0.6 < sizes.min() <= sizes.max() < 1.3
    left, _, right = torch.linalg.svd(made, full_matrices=False)
    wanted_left, _, wanted_right = torch.linalg.svd(
        orthogonal(made, COEFFICIENTS, 5, 1e-7), full_matrices=False
    )
    assert_close(left @ right, wanted_left @ wanted_right)  # directions stay


def test_matrices_in_a_stack_become_what_each_becomes_alone() -> None:
    matrices = torch.randn(3, 8, 20, dtype=torch.float64)
    together = orthogonal(matrices, COEFFICIENTS, 5, 1e-7)
    for matrix, made in zip(matrices, together, strict=True):
        assert_close(made, orthogonal(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("fast", ["float32", "bfloat16"])
def test_the_machine_decides_the_precision(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "forward_dtype", lambda device: fast)
    assert narrowed(torch.ones(2, 2)).dtype == getattr(torch, fast)
    assert narrowed(torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64
