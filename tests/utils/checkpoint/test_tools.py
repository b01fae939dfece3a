"""What `python -m utils.checkpoint` shows, verifies, compares, exports and imports."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from models.objective import load_tensors, saved_tensors, tables_of
from models.sparse_embedding import SparseEmbedding
from optim.averages import EMA
from tests.models.recursive.test_act import make
from tests.utils.checkpoint.helpers import META, alone, flip, names, together
from utils.checkpoint.__main__ import main
from utils.checkpoint.reader import load
from utils.checkpoint.resume import initial_weights
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """What a command prints."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert not (out if status == 2 else err)
    if status == 2:
        assert err.count("\n") == 1
    return out + err


def test_show_lists_every_tensor_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together(tmp_path / "checkpoints", 2, 7)
    first, second, *rest = told(capsys, "show", tmp_path).splitlines()
    assert first == f"{tmp_path}/checkpoints/step_7: step 7, 21 tensors, 5,090 bytes in 6 files"
    assert second == "written by 2 ranks, PyTorch 2"
    columns = {line.split()[0]: line.split(maxsplit=1)[1] for line in rest}
    assert len(columns) == 21
    assert columns["model/weight"].split() == [
        *("F32", "[40,", "30]", "4,800", "model.0.safetensors,", "model.1.safetensors")
    ]
    assert columns["shards/3/state/0"].split()[-1] == "shards.0.safetensors"


def test_verify_tells_whether_every_byte_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = alone(tmp_path / "checkpoints", 7)
    assert told(capsys, "verify", tmp_path).startswith(f"{folder}: whole, 6 files, ")
    flip(folder / "ema.safetensors")
    assert "step_7 is damaged (ema.safetensors: sha256 differs)" in told(
        capsys, "verify", tmp_path, status=2
    )


def test_diff_finds_the_same_in_other_files_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    alone(one, 7)
    together(two, 3, 7)
    assert told(capsys, "diff", one, two) == "the same: 21 tensors, to the bit\n"
    together(other, 2, 7, 8.5)
    said = told(capsys, "diff", two, other, status=1)
    assert said.startswith("12 of 21 tensors differ\nmodel/")
    assert "model/weight: 1,200 of 1,200 values, by at most 1.5\n" in said
    for value, largest in ((float("nan"), "beyond all numbers"), (-7.0, "14")):
        alone(tmp_path / str(value), 7, value=7.0)
        file = tmp_path / str(value) / "step_7" / "model.safetensors"
        content = file.read_bytes()
        seven = torch.tensor(7.0).numpy().tobytes()
        file.write_bytes(content.replace(seven, torch.tensor(value).numpy().tobytes(), 1))
        said = told(capsys, "diff", one, tmp_path / str(value), status=1)
        assert f"model/weight: 1 of 1,200 values, by at most {largest}\n" in said


def test_names_of_a_strangers_tensors_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b[2J\nb"
    for value in (0, 1):
        writer = Writer(tmp_path / str(value), Dist(), pytest.fail)
        writer.save(7, {"model": {evil: torch.tensor([value])}}, {**META, "code": evil})
        writer.close()
    for command in (("show", tmp_path / "0"), ("diff", tmp_path / "0", tmp_path / "1")):
        said = told(capsys, *command, status=int(command[0] == "diff"))
        assert "\x1b" not in said
        assert r"a\x1b[2J\nb" in said


@pytest.mark.parametrize("averages", [False, True])
def test_export_writes_weights_or_their_averages(
    averages: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As evaluations see them: sparse tables are not averaged."""
    torch.manual_seed(0)
    net, table = nn.Linear(3, 2), SparseEmbedding(5, 4)
    ema = EMA(dict(net.named_parameters()), 0.5)
    for _ in range(6):
        with torch.no_grad():
            net.weight.add_(1.0)
            table.weights.add_(1.0)
        ema.update()
    model = {**net.state_dict(), "table.weights": table.weights}
    groups = {"model": model, **({"ema": ema.state()} if averages else {})}
    writer = Writer(tmp_path / "run", Dist(), pytest.fail)
    writer.save(6, groups, {**META, "config": {"ema_rate": 0.5, "ema_warmup": False}})
    writer.close()
    said = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    kind = "averaged weights" if averages else "weights"
    assert said == f"{tmp_path}/out: {kind} of step 6, 3 tensors, 28 values\n"
    exported = load_file(tmp_path / "out" / "model.safetensors")
    if averages:
        assert not torch.equal(exported["weight"], net.weight)
        with ema.applied():
            assert torch.equal(exported["weight"], net.weight)
    assert torch.equal(exported["table.weights"], table.weights)
    assert json.loads((tmp_path / "out" / "origin.json").read_text())["step"] == 6
    assert "exists" in told(capsys, "export", tmp_path / "run", tmp_path / "out", status=2)


def published(path: Path, bare: bool) -> dict[str, torch.Tensor]:
    """As the published code saves a compiled net: prefixed names, initial states in bfloat16, tied
    to no device; a bare net without the loss around it.
    """
    torch.manual_seed(5)
    weights = {name: torch.randn(value.shape) for name, value in saved_tensors(make("trm")).items()}
    weights = {
        name: value.bfloat16() if name.endswith("_init") else value
        for name, value in weights.items()
    }
    state = OrderedDict(
        (f"_orig_mod.{name.removeprefix('model.') if bare else name}", value)
        for name, value in weights.items()
    )
    assert any(name.startswith("_orig_mod.inner.") for name in state) == bare
    torch.save(state, path)
    return weights


@pytest.mark.parametrize("bare", [False, True])
def test_published_weights_become_a_checkpoint(
    bare: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = published(tmp_path / "step_50", bare)
    said = told(capsys, "import", tmp_path / "step_50", tmp_path / "out")
    assert f"use it as checkpoint={tmp_path / 'out'}" in said
    told(capsys, "verify", tmp_path / "out")
    read = load(tmp_path / "out", ["model"])[0]["model"]
    assert read.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(read[name], value)
        assert read[name].dtype == value.dtype
    objective = make("trm")
    saved, tables = saved_tensors(objective), tables_of(objective)
    load_tensors(objective, initial_weights(str(tmp_path / "out"), None, saved, tables, print))
    assert all(
        torch.equal(value, weights[name].to(value.dtype))
        for name, value in saved_tensors(objective).items()
    )


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": Harmful()}, "is no state dict of tensors (it names posix.mkdir)"),
        ([torch.ones(2)], "is a list, or empty; a state dict is read"),
        ({"a": torch.ones(1), "step": 3}, "step is no plain tensor (int)"),
        ({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, "has the same names with and"),
    ],
)
def test_nothing_else_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: Any,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "step_1")
    assert told(capsys, "import", "step_1", "out", status=2).startswith(f"step_1: {problem}")
    assert names(tmp_path) == {"step_1"}, "nothing ran, and nothing is left"
