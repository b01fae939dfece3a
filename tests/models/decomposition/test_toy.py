"""Toy models compute what their formulas say."""

from typing import Any

import torch
from torch.testing import assert_close

from contract import IGNORE, Context, Noise
from data.decomposition.features import FeatureSpec
from tests.making import make_objective


def made(arch: str, features: int, **keys: Any) -> Any:
    return make_objective(arch, FeatureSpec(num_features=features), **keys)


def test_tms_is_its_formula_and_its_matrix_is_tied() -> None:
    net, x = made("tms", 5, identity_layers=1).model, torch.randn(6, 5)
    net.linear2.bias.data.normal_()
    W = net.linear1.weight
    assert_close(net(x), torch.relu(x @ W.t() @ W + net.linear2.bias))
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {"linear1.weight", "linear2.bias"}


def test_residual_mlps_are_their_formula() -> None:
    net = made("resid_mlp", 6, hidden_size=20, mlp_width=4, num_layers=2).model
    x, E = torch.randn(3, 6), net.embedding_ND
    assert_close(E.norm(dim=1), torch.ones(6))
    stream = x @ E
    for layer in net.layers:
        stream = stream + torch.relu(stream @ layer.mlp_in.weight.t()) @ layer.mlp_out.weight.t()
    assert_close(net(x), stream @ E.t())
    assert_close(net.wanted(x), x + torch.relu(x))
    assert "embedding_ND" in net.state_dict()
    assert [tuple(layer.mlp_in.weight.shape) for layer in net.layers] == [(2, 20)] * 2


def test_the_loss_is_a_sum_of_mean_squares() -> None:
    objective, x = made("tms", 5), torch.rand(8, 5)
    out = objective({"inputs": x}, None, Context(0.0, Noise(0, 0, range(8))))
    assert_close(out.loss, (objective.model(x) - x).square().mean(1).sum())
    assert out.weight == 8
    labels = torch.tensor([0] * 6 + [IGNORE] * 2)
    total, count = objective.predict({"inputs": x, "labels": labels}).metrics["loss"]
    assert_close(total / count, (objective.model(x) - x)[:6].square().mean())
    assert not objective.predict({"inputs": x, "labels": labels, "single": labels}).metrics
