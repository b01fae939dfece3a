"""Weights that torch has pickled: read as they are, and nothing but weights."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.models.recursive.test_act import make
from utils.checkpoint.__main__ import main
from utils.checkpoint.init_from import initial_weights
from utils.checkpoint.reader import load


def published(path: Path, legacy: bool = False, bare: bool = False) -> dict[str, torch.Tensor]:
    """As the published code saves a compiled net: prefixed names, initial states in bfloat16, tied
    to no device; a bare net without the loss around it.
    """
    torch.manual_seed(5)
    weights = {name: torch.randn(value.shape) for name, value in make("trm").saved().items()}
    weights = {
        name: value.bfloat16() if name.endswith("_init") else value
        for name, value in weights.items()
    }
    state = OrderedDict(
        (f"_orig_mod.{name.removeprefix('model.') if bare else name}", value)
        for name, value in weights.items()
    )
    assert any(name.startswith("_orig_mod.inner.") for name in state) == bare
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return weights


@pytest.mark.parametrize(("legacy", "bare"), [(False, False), (True, False), (False, True)])
def test_published_weights_become_a_checkpoint(
    tmp_path: Path, legacy: bool, bare: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = published(tmp_path / "step_50", legacy, bare)
    assert main(["import", str(tmp_path / "step_50"), str(tmp_path / "out")]) == 0
    assert f"use it as checkpoint={tmp_path / 'out'}" in capsys.readouterr().out
    read = load(tmp_path / "out", ["model"])[0]["model"]
    assert read.keys() == weights.keys()
    assert all(
        torch.equal(read[name], value) and read[name].dtype == value.dtype
        for name, value in weights.items()
    )
    objective = make("trm")
    objective.load_saved(initial_weights(str(tmp_path / "out"), "model", objective, print))
    assert all(
        torch.equal(value, weights[name].to(value.dtype))
        for name, value in objective.saved().items()
    )


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": Harmful()}, "is no state dict of tensors (it names posix.mkdir)"),
        (
            torch.nn.Linear(2, 2),
            "is no state dict of tensors (it names torch.nn.modules.linear.Linear)",
        ),
        ([torch.ones(2)], "holds a list; a state dict is read"),
        ({}, "holds nothing; a state dict is read"),
        ({"a": torch.ones(1), "step": 3}, "step is a int; a state dict of plain tensors is read"),
        (
            {"a": torch.ones(1), "_orig_mod.a": torch.ones(1)},
            "has the same names with and without _orig_mod.",
        ),
        (
            {"inner.a": torch.ones(1), "model.inner.a": torch.ones(1)},
            "has the same names with and without _orig_mod. or model.;",
        ),
        (
            {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            "a is quantised (torch.qint8); a state dict of plain tensors is read",
        ),
        ({"__metadata__": torch.ones(1)}, "__metadata__ is a name that safetensors files use"),
        ({"a": torch.ones(2).to_sparse()}, "a is a torch.sparse_coo tensor on cpu; a state dict"),
        ({3: torch.ones(2)}, "3 is no name; a state dict of plain tensors is read"),
        ({"a\ud800": torch.ones(2)}, "cannot be written as safetensors ("),
    ],
)
def test_nothing_else_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: Any,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "step_1")
    assert main(["import", "step_1", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"step_1: {problem}")
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == ["step_1"], "nothing ran, and nothing is left"


def test_a_full_disk_is_no_fault_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    torch.save({"a": torch.ones(1)}, tmp_path / "step_1")
    assert main(["import", str(tmp_path / "step_1"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"{tmp_path}/out: cannot be written (No space left on device); give another folder\n"
    )


def test_what_is_no_such_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare").write_bytes(pickle.dumps({"a": 1}))
    Path("text").write_text("hello\n")
    published(Path("step_2"))
    for file, folder, problem in [
        ("none", "out", "none: no such file"),
        ("text", "out", "text: is no state dict of tensors ("),
        ("bare", "out", "bare: "),
        ("step_2", ".", ".: exists; give a folder that does not"),
        ("step_2", "text/out", "text/out: cannot be written ("),
    ]:
        assert main(["import", file, folder]) == 2
        assert capsys.readouterr().err.startswith(problem)
