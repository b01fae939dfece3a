"""Matrices as targets: parts of fused ones against an unfused twin, and settings by name."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from contract import Noise, Spec
from models.decomposition import components
from models.decomposition.components import Components, Mask
from models.decomposition.decompose import Decompose
from models.decomposition.masking import Masks, masked_outputs, route
from models.decomposition.seams import seams_of
from models.layers import Attention, Linear, SwiGLU
from tests.models.decomposition.test_components import changed, objective_on, with_gradients
from utils.errors import ConfigError

SINGLE = r"arch.modules=['.*\.[qkvo]_proj','.*\.(gate|up|down)_proj']"
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
NAMES = [
    f"layers.{layer}.{room}.{name}"
    for layer in range(2)
    for room, names in zip(("self_attn", "mlp"), PARTS, strict=True)
    for name in names
]


class Joined(nn.Module):
    """Several matrices whose outputs follow each other."""

    def __init__(self, parts: list[Linear]) -> None:
        super().__init__()
        self._parts = (parts,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts[0]], -1)


def unfused(net: nn.Module) -> nn.Module:
    """A copy of a net in which every part of a fused matrix is a separate module."""
    twin = deepcopy(net)
    for module in list(twin.modules()):
        if not isinstance(module, Attention | SwiGLU):
            continue
        ((name, widths),) = module.fused.items()
        weight, parts = getattr(module, name).weight, []
        for part, rows in zip(widths, weight.split(list(widths.values())), strict=True):
            linear = Linear(weight.shape[1], len(rows)).to(weight.dtype).requires_grad_(False)
            linear.weight.data = rows.clone()
            parts.append(linear)
            setattr(module, part, linear)
        delattr(module, name)
        setattr(module, name, Joined(parts))
        del module.fused
    return twin


def twin_of(objective: Decompose, monkeypatch: pytest.MonkeyPatch) -> Components:
    """The same components of the unfused twin of an objective's target."""
    model, target = objective.model, nn.Module()
    target.net = unfused(model.target.net)
    monkeypatch.setattr(components, "load_frozen", lambda *ignored: target)
    spec = Spec()
    keys = components.ComponentsKeys(
        target="twin",
        modules=[r"layers\..*"],
        C=6,
        gates={"kind": "mlp", "width": 16},
        forward_dtype="float64",
        init="random",
    )
    made = Components(spec, keys).double()
    made.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "target" not in name},
        strict=False,
    )
    return made


def test_parts_of_fused_matrices_are_those_of_an_unfused_twin(
    gpt_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch, ctx = objective_on(gpt_target, tmp_path, SINGLE)
    assert objective.model.names == NAMES
    twin = twin_of(objective, monkeypatch)
    assert sorted(twin.names) == sorted(NAMES)
    order = [twin.names.index(name) for name in NAMES]
    tokens = batch["inputs"]
    (said, inputs), (others, seen) = objective.model.probe(tokens), twin.probe(tokens)
    assert_close(said, others)
    assert_close(inputs, [seen[number] for number in order])
    assert_close(said, objective.model.outputs(tokens))
    for chosen in ([0], [1, 2], [3, 4], [5], list(range(14))):
        masks = {
            n: Mask(*(torch.rand(len(tokens), 16, size).double() for size in (6, 1)))
            for n in chosen
        }
        found = []
        for model, places in ((objective.model, range(14)), (twin, order)):
            instead = {
                places[n]: partial(model.multiply, places[n], mask=mask)
                for n, mask in masks.items()
            }
            found.append(model.run_with(tokens, instead))
        assert_close(found[0], found[1])
        assert (found[0] - said).abs().max() > 1e-3
    alone = changed(objective, layerwise=0.0, stochastic=0.0, subset=1.0)
    _, grads = with_gradients(alone, batch, ctx)
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert len([name for name in grads if name.startswith("model.parts")]) == 2 * 14


def test_a_fused_matrix_stays_one_target_where_a_pattern_matches_it(
    gpt_target: Path, tmp_path: Path
) -> None:
    objective, _, _ = objective_on(gpt_target, tmp_path, r"arch.modules=['layers\..*']")
    last = [name.rpartition(".")[2] for name in objective.model.names[:4]]
    assert last == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    with pytest.raises(ConfigError, match=r"chooses layers\.0\.self_attn\.q_proj, a part"):
        objective_on(gpt_target, tmp_path, r"arch.modules=['layers\..*','.*\.q_proj']")


def test_matrices_have_as_many_components_as_their_patterns_say(
    gpt_target: Path, tmp_path: Path
) -> None:
    """Against as many for all, of which some are nothing."""
    one = r"arch.modules=['layers\.0\..*']"
    wide, batch, ctx = objective_on(gpt_target, tmp_path / "wide", one)
    few, _, _ = objective_on(
        gpt_target, tmp_path / "few", one, r"arch.C={'.*\.o_proj':2,'.*mlp.*':4,'.*':6}"
    )
    assert few.model.counts == [6, 2, 4, 4]
    assert [few.model.columns(n) for n in (1, 3)] == [slice(6, 8), slice(12, 16)]
    kept = torch.cat([torch.arange(6 * n, 6 * n + c) for n, c in enumerate(few.model.counts)])
    with torch.no_grad():
        for number, count in enumerate(few.model.counts):
            name = few.model.names[number].replace(".", "-")
            ours: Any = few.model.parts[name]
            theirs: Any = wide.model.parts[name]
            theirs.V[:, count:] = 0
            ours.V.copy_(theirs.V[:, :count])
            ours.U.copy_(theirs.U[:count])
        for p, q in zip(few.model.gates.parameters(), wide.model.gates.parameters(), strict=True):
            p.copy_(q[kept])
    tokens = batch["inputs"]
    inputs = few.model.probe(tokens)[1]
    assert_close(few.model.gate_logits(inputs), wide.model.gate_logits(inputs)[..., kept])
    masks = torch.rand(len(tokens), 2, 16, 24).double(), torch.rand(len(tokens), 2, 16, 4).double()
    found = []
    for objective, components_ in ((few, masks[0][..., kept]), (wide, masks[0])):
        chosen = route(Masks(components_, masks[1]), objective.model, Noise(0, 0, [0]), 1, None)
        found.append([*masked_outputs(objective.model, tokens, None, chosen)])
    assert_close(found[0], found[1])
    loss, gradients = with_gradients(few, batch, ctx)
    assert torch.isfinite(loss)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def test_every_linear_map_has_its_name() -> None:
    attention = Attention(8, 4, kv_heads=2)
    attention.qkv_proj.bias = nn.Parameter(torch.randn(16))
    found = seams_of(nn.ModuleDict({"a": attention}))
    assert [*found] == ["a.qkv_proj", "a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"]
    assert [found[f"a.{n}_proj"].part for n in "qkv"] == [(0, 8), (8, 12), (12, 16)]
    x = torch.randn(3, 8)
    key = found["a.k_proj"]
    assert_close(key.original(x), attention.qkv_proj(x)[:, 8:12])
    assert_close(x @ key.matrix + key.bias, attention.qkv_proj(x)[:, 8:12])
    assert_close(F.linear(x, key.matrix.t(), key.bias), key.original(x))
