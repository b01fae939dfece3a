"""Muon: momentum whose matrices are made orthogonal by Newton and Schulz's iteration (Jordan et al.
2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from utils.measure import hardware

# elements of matrices of one shape that a GPU makes orthogonal together, for the sake of memory
TOGETHER = 1 << 26
# from a parameter's name and this rank's rows: all rows, and the number of this rank's first one
Whole = Callable[[str, Tensor], tuple[Tensor, int]]


class Muon(torch.optim.Muon):
    """PyTorch's, which iterates in bfloat16, if this machine is fast in it: a CPU without products
    in it would take 20 to 30 times as long as in float32.
    """

    whole: Whole = staticmethod(
        lambda name, share: (share, 0)
    )  # a sync that splits matrices sets it

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """As PyTorch's does but for the precision, and for matrices of which each rank holds some
        rows: all ranks gather a matrix, and each takes its rows of the update.
        """
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, int, Tensor]]] = {}
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    wanted = self._wanted(parameter, parameter.grad, group)
                    matrix, first = self.whole(name, wanted)
                    same = by_shape.setdefault(matrix.shape, [])
                    same.append((parameter, first, narrowed(matrix)))
            for shape, same in by_shape.items():
                # a CPU is faster one by one
                count = max(1, TOGETHER // shape.numel()) if same[0][0].is_cuda else 1
                for i in range(0, len(same), count):
                    _update(same[i : i + count], group)

    def _wanted(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the step that momentum wants."""
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(mean, momentum) if group["nesterov"] else mean


def _update(same: list[tuple[Tensor, int, Tensor]], group: dict[str, Any]) -> None:
    """Updates parameters of one shape: each comes with the number of its first row, and its
    matrix.
    """
    first_matrix = same[0][2]
    rows, columns = first_matrix.shape
    stacked = first_matrix if len(same) == 1 else torch.stack([matrix for _, _, matrix in same])
    updates = orthogonal(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    for (parameter, first, _), update in zip(same, updates.reshape(-1, rows, columns), strict=True):
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
            update[first : first + len(parameter)],
            alpha=-group["lr"] * max(1, rows / columns) ** 0.5,
        )


def narrowed(matrix: Tensor) -> Tensor:
    """Returns a matrix in the type in which this machine is fast, of which eight bits suffice;
    float64 is for comparisons, and stays.
    """
    if matrix.dtype == torch.float64:
        return matrix
    return matrix.to(getattr(torch, hardware.forward_dtype(matrix.device)))


def orthogonal(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Approximates the nearest orthogonal matrix, of one matrix or of each in a stack, in their own
    precision.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply: Any = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
