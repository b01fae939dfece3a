"""Gates equal plain MLPs, one for each component, and leak on the right side."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from models.decomposition import gates
from models.decomposition.gates import LowerLeaky, ScalarMLPs, make_gates, upper_leaky
from models.decomposition.seams import Seam
from models.layers import Linear


@pytest.mark.parametrize(("chunk", "kept"), [(1 << 17, 8), (1, 8), (1, 0), (100, 0)])
def test_the_fused_function_is_the_formula_with_its_gradients(
    chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "CHUNK", chunk)
    monkeypatch.setattr(gates, "KEPT_PIECES", kept)
    given = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 7), (5, 3), (5, 3), (5, 3))
    ]
    x, inward, bias, outward = given

    def plain() -> torch.Tensor:
        return (F.gelu(x[:, :, None] * inward[:, None] + bias[:, None]) * outward[:, None]).sum(-1)

    assert_close(ScalarMLPs.apply(*given), plain())
    direction = torch.randn(5, 7, dtype=torch.float64)
    expected = torch.autograd.grad((plain() * direction).sum(), given)
    assert_close(torch.autograd.grad((ScalarMLPs.apply(*given) * direction).sum(), given), expected)


def test_each_kind_is_mlps_by_themselves() -> None:
    sizes, widths, hidden = [3, 2], [4, 6], 5
    inner = [torch.randn(7, size) for size in sizes]
    inputs = [torch.randn(7, width) for width in widths]
    seams = [Seam(str(width), Linear(width, 3)) for width in widths]
    made: dict[str, Any] = {
        kind: make_gates(kind, hidden, sizes, seams) for kind in ("mlp", "vector_mlp", "shared_mlp")
    }
    for net in made.values():
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
    mlp, vector, shared = made.values()
    # matrix, component, its column
    columns = [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4)]
    for number, c, k in columns:
        act = F.gelu(inner[number][:, c : c + 1] * mlp.inward_KH[k] + mlp.inward_bias_KH[k])
        assert_close(mlp(inner)[:, k], act @ mlp.outward_KH[k] + mlp.outward_bias_K[k])
        x, units = inputs[number], slice(c * hidden, (c + 1) * hidden)
        act = F.gelu(x @ vector.inward[number][:, units] + vector.inward_bias[number][units])
        wanted = act @ vector.outward[number][c] + vector.outward_bias_K[k]
        assert_close(vector(inputs)[:, k], wanted)
        act = F.gelu(x @ shared.inward[number] + shared.inward_bias[number])
        wanted = act @ shared.outward[number][:, c] + shared.outward_bias_K[k]
        assert_close(shared(inputs)[:, k], wanted)


def test_leaks() -> None:
    x = torch.tensor([-1.0, -1.0, 0.5, 2.0], requires_grad=True)
    y = LowerLeaky.apply(x)
    assert y.tolist() == [0.0, 0.0, 0.5, 1.0]
    # what would open a closed gate comes through as a hundredth, what would close it does not, nor
    # what would move an open one
    y.backward(torch.tensor([-1.0, 1.0, 1.0, 1.0]))
    assert x.grad is not None
    assert_close(x.grad, torch.tensor([-0.01, 0.0, 1.0, 0.0]))
    x.grad = None
    y = upper_leaky(x)
    assert_close(y, torch.tensor([0.0, 0.0, 0.5, 1.01]))
    y.sum().backward()
    assert_close(x.grad, torch.tensor([0.0, 0.0, 1.0, 0.01]))
