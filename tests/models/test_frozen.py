"""Frozen parts: filled from their files whole or not at all, and never moved by training."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from contract import Objective
from models.frozen import Frozen
from models.objective import frozen_files, load_tensors, saved_tensors, shared_tensors, tables_of
from models.sparse_embedding import SparseEmbedding
from utils.errors import ConfigError


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def content(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in build().state_dict().items()
    }


class Half(Objective):
    """Half of its net is frozen, with a table inside."""

    def __init__(self, path: Path) -> None:
        frozen = nn.Module()
        frozen.table = SparseEmbedding(2, 2)
        save_file(dict(frozen.state_dict()), path)
        net = nn.Module()
        net.base = Frozen(frozen, str(path))
        net.last, net.table = nn.Linear(3, 1), SparseEmbedding(5, 2)
        net.register_buffer("sines", torch.ones(2), persistent=False)
        super().__init__(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_its_file_and_stays_so(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(content(dtype), tmp_path / "net.safetensors")
    torch.manual_seed(0)
    part = Frozen(build(), str(tmp_path / "net.safetensors"))
    around = nn.Sequential(part, nn.Linear(3, 1)).train()
    assert not any(module.training for module in part.modules())
    assert around[1].training
    assert not any(p.requires_grad for p in part.parameters())
    around[1](part(torch.randn(8, 4, dtype=dtype)).float()).sum().backward()
    assert {name: (t.dtype, t.tolist()) for name, t in part.net.state_dict().items()} == {
        name: (t.dtype, t.tolist()) for name, t in content(dtype).items()
    }
    assert part.sha256 == hashlib.sha256((tmp_path / "net.safetensors").read_bytes()).hexdigest()


def test_a_folder_of_files_is_one_net(tmp_path: Path) -> None:
    tensors, lines = content(), ""
    for number, names in enumerate((list(tensors)[:3], list(tensors)[3:])):
        file = tmp_path / f"part{number}.safetensors"
        save_file({name: tensors[name] for name in names}, file)
        lines += f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
    part = Frozen(build(), str(tmp_path))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in part.net.state_dict().items())
    assert part.sha256 == hashlib.sha256(lines.encode()).hexdigest(), (
        "as `sha256sum *.safetensors | sha256sum` has it"
    )


WRONG = {
    "missing": (lambda state: state.pop("0.bias"), r"0\.bias is missing from it; use the files"),
    "more": (lambda state: state.update(more=torch.ones(1)), "holds more, which is not in this"),
    "shape": (lambda state: state.update({"0.bias": torch.ones(4)}), r"is \(4,\) of floats there"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_of_another_net_is_refused(tmp_path: Path, kind: str) -> None:
    state, (change, message) = content(), WRONG[kind]
    change(state)
    save_file(state, tmp_path / "net.safetensors")
    with pytest.raises(ConfigError, match=message):
        Frozen(build(), str(tmp_path / "net.safetensors"))


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file, or a folder without safetensors files"):
        Frozen(build(), str(tmp_path))
    torch.save(content(), tmp_path / "net.pt")
    with pytest.raises(ConfigError, match="cannot be read as safetensors") as caught:
        Frozen(build(), str(tmp_path / "net.pt"))
    assert "\n" not in str(caught.value)


def test_an_objective_saves_and_shares_what_is_not_frozen(tmp_path: Path) -> None:
    objective = Half(tmp_path / "base.safetensors")
    names = {"model.last.weight", "model.last.bias", "model.table.weights"}
    assert saved_tensors(objective).keys() == names
    assert shared_tensors(objective).keys() == {*names, "model.sines"}
    assert tables_of(objective).keys() == {"model.table"}
    (known,) = frozen_files(objective).items()
    assert known[0] == "model.base"
    assert known[1].keys() == {"path", "sha256"}

    before = {name: tensor.clone() for name, tensor in saved_tensors(objective).items()}
    for tensor in saved_tensors(objective).values():
        tensor.add_(1)
    load_tensors(objective, before)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in saved_tensors(objective).items()
    )
    objective.target = objective.model.base  # a part with two names is saved under neither
    assert saved_tensors(objective).keys() == names
    with pytest.raises(KeyError, match=r"model\.last\.bias"):
        load_tensors(objective, {name: before[name] for name in names - {"model.last.bias"}})
    with pytest.raises(KeyError, match=r"model\.base\.net\.table"):
        load_tensors(objective, {**before, "model.base.net.table.weights": torch.zeros(2, 2)})


def test_files_hold_tied_weights_under_one_of_their_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        net = nn.ModuleDict(
            {"embed": nn.Linear(4, 3, bias=False), "head": nn.Linear(4, 3, bias=False)}
        )
        net["head"].weight = net["embed"].weight
        return net

    save_file({"embed.weight": torch.arange(12.0).view(3, 4)}, tmp_path / "net.safetensors")
    part = Frozen(tied(), str(tmp_path / "net.safetensors"))
    assert torch.equal(part.net["head"].weight, torch.arange(12.0).view(3, 4))
