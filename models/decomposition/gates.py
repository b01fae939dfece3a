"""Gates: small MLPs that predict how much of each component an input needs, and the two functions
that clamp their outputs to between 0 and 1: one for masks, one for the cost of gates.
"""

# N rows (examples, or positions), C components of a matrix, K components of all matrices, H hidden
# width, D width of a matrix's input

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.decomposition.seams import Seam
from utils.errors import ConfigError

SLOPE = 0.01  # of the leaky parts
CHUNK = 1 << 17  # hidden units times rows at once, which stay in the processor's cache
KEPT_PIECES = 8


class LowerLeaky(torch.autograd.Function):
    """Clamps to between 0 and 1, for masks. Below 0 a gradient passes only if it would open the
    gate, times `SLOPE`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), grad = ctx.saved_tensors, grads[0]
        # a gate that is shut could otherwise never open again
        inside = torch.where(x <= 1, grad, 0)
        return torch.where(x <= 0, SLOPE * grad.clamp(max=0), inside)


def upper_leaky(x: Tensor) -> Tensor:
    """Clamps to between 0 and 1, with a slope of `SLOPE` above 1, for the cost of gates: there a
    gate still learns that it should close.
    """
    return torch.where(x > 1, 1 + SLOPE * (x - 1), x.clamp(0, 1))


class ScalarMLPs(torch.autograd.Function):
    """An MLP with one input and one output for each component, all at once, in pieces that stay in
    cache.

    Two to three times as fast as autograd on a CPU. Rows come last, so that products are with row
    vectors and sums run along memory: products with column vectors are many times slower.
    """

    @staticmethod
    def forward(ctx: Any, x_KN: Tensor, in_KH: Tensor, bias_KH: Tensor, out_KH: Tensor) -> Tensor:
        # each piece of components stays in the cache from input to output
        y_KN, kept = torch.empty_like(x_KN), []
        pieces = _pieces(x_KN, in_KH)
        for piece in pieces:
            hidden_KHN = _hidden(x_KN[piece], in_KH[piece], bias_KH[piece])
            act_KHN = F.gelu(hidden_KHN)
            torch.bmm(out_KH[piece].unsqueeze(1), act_KHN, out=y_KN[piece].unsqueeze(1))
            kept += [hidden_KHN, act_KHN]
        if len(pieces) > KEPT_PIECES:  # beyond the cache, computing again is faster than reading
            kept = []
        ctx.save_for_backward(x_KN, in_KH, bias_KH, out_KH, *kept)
        return y_KN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x_KN, in_KH, bias_KH, out_KH, *kept = ctx.saved_tensors
        grad_KN = grads[0].contiguous()
        grad_x, grad_in, grad_bias, grad_out = map(torch.empty_like, (x_KN, in_KH, bias_KH, out_KH))
        for number, piece in enumerate(_pieces(x_KN, in_KH)):
            # hidden values from the forward pass, or computed again where keeping them was slower
            if kept:
                hidden_KHN, act_KHN = kept[2 * number : 2 * number + 2]
            else:
                hidden_KHN = _hidden(x_KN[piece], in_KH[piece], bias_KH[piece])
                act_KHN = F.gelu(hidden_KHN)
            # the chain rule by hand, through output weights, GELU, bias and input weights, reusing
            # buffers
            x_K1N, grad_K1N = x_KN[piece].unsqueeze(1), grad_KN[piece].unsqueeze(1)
            torch.sum(act_KHN * grad_K1N, 2, out=grad_out[piece])
            grad_act_KHN = out_KH[piece].unsqueeze(2) * grad_K1N
            grad_hidden_KHN = torch.ops.aten.gelu_backward(grad_act_KHN, hidden_KHN)
            torch.sum(grad_hidden_KHN, 2, out=grad_bias[piece])
            torch.bmm(in_KH[piece].unsqueeze(1), grad_hidden_KHN, out=grad_x[piece].unsqueeze(1))
            torch.sum(grad_hidden_KHN.mul_(x_K1N), 2, out=grad_in[piece])
        return grad_x, grad_in, grad_bias, grad_out


def _pieces(x_KN: Tensor, in_KH: Tensor) -> list[slice]:
    """Cuts between components, so that no sum over rows is cut."""
    step = len(x_KN)
    if x_KN.device.type == "cpu":
        step = max(1, CHUNK // max(1, x_KN.shape[1] * in_KH.shape[1]))
    return [slice(start, start + step) for start in range(0, len(x_KN), step)]


def _hidden(x_KN: Tensor, in_KH: Tensor, bias_KH: Tensor) -> Tensor:
    return (in_KH.unsqueeze(2) * x_KN.unsqueeze(1)).add_(bias_KH.unsqueeze(2))


class MLPGates(nn.Module):
    """A gate reads only the activation of its component."""

    reads_activations = True

    def __init__(self, components: Sequence[int], hidden: int) -> None:
        super().__init__()
        total = sum(components)
        self.inward_KH = nn.Parameter(torch.randn(total, hidden) * 2**0.5)
        self.inward_bias_KH = nn.Parameter(torch.zeros(total, hidden))
        self.outward_KH = nn.Parameter(torch.randn(total, hidden) * hidden**-0.5)
        self.outward_bias_K = nn.Parameter(torch.zeros(total))

    def forward(self, activations: Sequence[Tensor]) -> Tensor:
        """Returns [N, K] from the activations [N, C] of each matrix."""
        x_KN = torch.cat([x_NC.t() for x_NC in activations])
        y_KN = ScalarMLPs.apply(x_KN, self.inward_KH, self.inward_bias_KH, self.outward_KH)
        return y_KN.t() + self.outward_bias_K


class InputMLPGates(nn.Module):
    """A gate reads the whole input of its matrix: with its own MLP, or one that all gates of the
    matrix share.
    """

    reads_activations = False

    def __init__(
        self, components: Sequence[int], widths: Sequence[int], hidden: int, shared: bool
    ) -> None:
        super().__init__()
        self.shared = shared
        # initial weights keep the variance of a matrix's input through the GELU
        pairs = zip(widths, components, strict=True)
        sizes = [(d, hidden if shared else c * hidden) for d, c in pairs]
        self.inward = nn.ParameterList(
            nn.Parameter(torch.randn(d, units) * (2 / d) ** 0.5) for d, units in sizes
        )
        self.inward_bias = nn.ParameterList(nn.Parameter(torch.zeros(units)) for _, units in sizes)
        self.outward = nn.ParameterList(
            nn.Parameter(torch.randn((hidden, c) if shared else (c, hidden)) * hidden**-0.5)
            for c in components
        )
        self.outward_bias_K = nn.Parameter(torch.zeros(sum(components)))

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns [N, K] from the inputs [N, D] of each matrix."""
        outputs = []
        for x_ND, inward, bias, outward in zip(
            inputs, self.inward, self.inward_bias, self.outward, strict=True
        ):
            act = F.gelu(torch.addmm(bias, x_ND, inward))
            # one hidden layer for all gates of a matrix, or a slice of its units for each gate
            if self.shared:
                outputs.append(act @ outward)
            else:
                outputs.append((act.unflatten(1, outward.shape) * outward).sum(-1))
        return torch.cat(outputs, 1) + self.outward_bias_K


Gates = MLPGates | InputMLPGates


def make_gates(kind: str, width: int, components: Sequence[int], seams: Sequence[Seam]) -> Gates:
    """Makes gates, given the number of components and the seam of each matrix."""
    if kind == "mlp":
        return MLPGates(components, width)
    for seam in seams:
        if seam.indexed:
            raise ConfigError(
                f"arch.gates.kind={kind}: reads the input of matrices, and {seam.name} is an"
                " embedding, which has none; use mlp"
            )
    widths = [len(seam.matrix) for seam in seams]
    return InputMLPGates(components, widths, width, shared=kind == "shared_mlp")
