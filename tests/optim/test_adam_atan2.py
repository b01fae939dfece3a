"""AdamATan2 against the formula written out for one tensor at a time."""

import torch
from torch import nn
from torch.testing import assert_close

from optim.adam_atan2 import AdamATan2


def reference_step(p, grad, mean, square, step, lr, betas, weight_decay):
    """Plain arithmetic in float64; returns the new (p, mean, square)."""
    mean = betas[0] * mean + (1 - betas[0]) * grad
    square = betas[1] * square + (1 - betas[1]) * grad**2
    second = (square / (1 - betas[1] ** step)).sqrt()
    return (
        p * (1 - lr * weight_decay) - lr / (1 - betas[0] ** step) * torch.atan2(mean, second),
        mean,
        square,
    )


def test_equals_the_formula_over_several_steps():
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (), (2, 3, 4))]
    optimizer = AdamATan2(parameters, lr=0.03, betas=(0.8, 0.97), weight_decay=0.2)
    expected = [
        (p.detach().double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double())
        for p in parameters
    ]
    for step in range(1, 8):
        grads = [torch.randn(p.shape) * 10.0 ** torch.randint(-9, 3, p.shape) for p in parameters]
        for i, (p, grad) in enumerate(zip(parameters, grads, strict=True)):
            p.grad = grad
            expected[i] = reference_step(
                expected[i][0], grad.double(), *expected[i][1:], step, 0.03, (0.8, 0.97), 0.2
            )
        optimizer.step()
    for p, (value, _, _) in zip(parameters, expected, strict=True):
        assert_close(p.double(), value, atol=1e-6, rtol=1e-6)
