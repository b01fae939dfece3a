"""Toy models: small nets whose right decomposition is known, and their objective.

Toy models of superposition: Elhage et al. 2022 (arXiv 2209.10652). Residual MLPs that compute in
superposition: Braun et al. 2025 (arXiv 2501.14926), Bushnaq et al. 2025 (arXiv 2506.20790).
"""

# B batch, N features, H width of the bottleneck or of a hidden layer, D width of the stream

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import Doc

from contract import IGNORE, Batch, Carry, Context, Objective, Prediction, Spec, StepOut
from models.layers import (
    ForwardDtype,
    Layers,
    Linear,
    Width,
    check_memory,
    parse_dtype,
    widen,
)
from utils.errors import ConfigError


class Transposed(nn.Module):
    """The transpose of another layer's matrix, with its own bias."""

    def __init__(self, other: Linear, width_out: int) -> None:
        super().__init__()
        self._other = (other,)  # in a tuple, so that its weight has one name
        self.bias = nn.Parameter(torch.zeros(width_out))

    @property
    def matrix(self) -> Tensor:
        """Returns W [inputs, outputs]."""
        return self._other[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix.t().to(x.dtype), self.bias.to(x.dtype))


class Toy(nn.Module):
    """The base of both toy models, which have as many outputs as input features."""

    def __init__(self, spec: Spec, forward_dtype: str, what: str) -> None:
        super().__init__()
        if not hasattr(spec, "num_features"):
            raise ConfigError(
                f"arch={what} needs features, and the data has none; use data=features"
            )
        self.dtype, self.features = parse_dtype(forward_dtype), spec.num_features

    def wanted(self, x_BN: Tensor) -> Tensor:
        return x_BN


class TMS(Toy):
    """relu(x Wᵀ W + b): more features than the bottleneck is wide, told apart as long as few are
    active at once.
    """

    def __init__(
        self,
        spec: Spec,
        hidden_size: Annotated[Width, Doc("fewer than there are features")],
        identity_layers: Annotated[
            int, Field(ge=0, le=1000), Doc("fixed identity layers in the middle")
        ],
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__(spec, forward_dtype, "tms")
        check_memory(hidden_size * (self.features + identity_layers * hidden_size))
        # into the bottleneck and back by the same weights
        self.linear1 = Linear(self.features, hidden_size)
        nn.init.xavier_normal_(self.linear1.weight)
        self.middle = nn.ModuleList(_identity(hidden_size) for _ in range(identity_layers))
        self.linear2 = Transposed(self.linear1, self.features)

    def forward(self, x_BN: Tensor) -> Tensor:
        x_BH = self.linear1(x_BN)
        for layer in self.middle:
            x_BH = layer(x_BH)
        return F.relu(self.linear2(x_BH))


class ResidMLP(Toy):
    """x + relu(x) of every feature, by MLPs with fewer neurons than features. They read from and
    write to a stream. Fixed random directions embed the features in it, and read them from it.
    """

    embedding_ND: Tensor

    def __init__(
        self,
        spec: Spec,
        hidden_size: Annotated[Width, Doc("width of the stream")],
        mlp_width: Annotated[Width, Doc("neurons of all layers together")],
        num_layers: Layers,
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__(spec, forward_dtype, "resid_mlp")
        check_memory(hidden_size * (self.features + 2 * mlp_width))
        if mlp_width % num_layers:
            raise ConfigError(
                f"arch.mlp_width={mlp_width}: the neurons of all layers, which must be a multiple"
                f" of num_layers={num_layers}"
            )
        # fixed directions: the MLPs must learn to read them, and not the other way round
        self.register_buffer(
            "embedding_ND", F.normalize(torch.randn(self.features, hidden_size), dim=1)
        )
        self.layers = nn.ModuleList(
            MLP(hidden_size, mlp_width // num_layers) for _ in range(num_layers)
        )

    def forward(self, x_BN: Tensor) -> Tensor:
        embedding_ND = self.embedding_ND.to(x_BN.dtype)
        # features become directions of the stream, to which each layer adds
        x_BD = x_BN @ embedding_ND
        for layer in self.layers:
            x_BD = x_BD + layer(x_BD)
        return x_BD @ embedding_ND.t()

    def wanted(self, x_BN: Tensor) -> Tensor:
        return x_BN + F.relu(x_BN)


class MLP(nn.Module):
    """Two matrices without biases, and a ReLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp_in, self.mlp_out = Linear(width, hidden), Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.relu(self.mlp_in(x)))


def _identity(width: int) -> Linear:
    """Returns a layer that computes the identity and is not trained."""
    layer = Linear(width, width)
    nn.init.eye_(layer.weight)
    layer.requires_grad_(False)
    return layer


class Regress(Objective):
    """Sums the mean squared error of each example."""

    headline = "loss"
    costs = frozenset({"loss"})
    model: Toy

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        errors_B = self._errors(batch["inputs"])[0]
        return StepOut(errors_B.sum(), torch.full((), len(errors_B), device=errors_B.device), {})

    def predict(self, batch: Batch) -> Prediction:
        """Reports a mean loss, except for examples with a single feature."""
        errors_B, answer_BN = self._errors(batch["inputs"])
        counts_B = batch["labels"] != IGNORE
        metrics = {"loss": ((errors_B * counts_B).sum(), counts_B.sum())}
        return Prediction({} if "single" in batch else metrics, {"answer": answer_BN})

    def _errors(self, inputs_BN: Tensor) -> tuple[Tensor, Tensor]:
        x_BN = inputs_BN.to(self.dtype)
        answer_BN = widen(self.call_net(x_BN))
        return (answer_BN - self.model.wanted(widen(x_BN))).square().mean(-1), answer_BN
