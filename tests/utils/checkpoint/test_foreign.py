"""Weights of other repositories: how their files are laid out, and what is read from them."""

import os
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.objective import saved_tensors, start_from
from tests.models.recursive.test_act import make
from tests.utils.checkpoint.helpers import names, told
from utils.checkpoint.foreign import layout_of
from utils.checkpoint.reader import load
from utils.checkpoint.registry import check_alike
from utils.errors import ConfigError

LAYOUT = "arch=trm arch.hidden_size=16 arch.L_layers=1"
BUFFERS = ("H_init", "L_init", "puzzle_emb.weights")
Weights = dict[str, Tensor]
Import = Callable[..., Weights]


def trained(seed: int) -> Weights:
    """A TRM's weights by our names; others save its initial states in half precision."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in saved_tensors(make("trm")).items()
    }
    return {
        name: value.bfloat16() if name.endswith("_init") else value for name, value in drawn.items()
    }


def averaged() -> Weights:
    """Its averages: parameters alone have one."""
    return {name: value for name, value in trained(6).items() if not name.endswith(BUFFERS)}


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Import:
    """Writes a file, and returns what is imported from it."""

    def write_and_import(content: Any, *options: str, kind: str = "weights") -> Weights:
        torch.save(content, tmp_path / "step_50")
        folder = tmp_path / "_".join(["out", *options])
        said = told(capsys, "import", *options, tmp_path / "step_50", folder)
        assert said.startswith(f"{folder}: {kind}, ")
        said = said.removesuffix("\n").removesuffix(f" with {LAYOUT}")
        assert said.endswith(f"use it as checkpoint={folder} or init_from={folder}")
        told(capsys, "verify", folder)
        return load(str(folder), ["model"])[0]["model"]

    return write_and_import


def assert_same(read: Weights, expected: Weights) -> None:
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(read[name], value), name
        assert read[name].dtype == value.dtype


@pytest.mark.parametrize(
    "renamed",
    [
        "{}".format,  # alphaXiv; TRM with DISABLE_COMPILE
        "_orig_mod.{}".format,  # HRM, TRM, CGAR
        "module._orig_mod.{}".format,
        lambda name: f"_orig_mod.{name.removeprefix('model.')}",  # the net without its loss
        lambda name: name.replace("model.inner.", "model._orig_mod.inner."),
    ],
)
def test_names_of_a_state_dict(
    renamed: Callable[[str], str], imported: Import, tmp_path: Path
) -> None:
    read = imported(OrderedDict((renamed(name), value) for name, value in trained(5).items()))
    assert_same(read, trained(5))
    objective = make("trm")
    start_from(objective, str(tmp_path / "out"), print)
    for name, value in saved_tensors(objective).items():
        assert torch.equal(value, read[name].to(value.dtype))


@dataclass
class Carry:
    """Stands for a class of their repository, which is not there when the file is read."""

    z_H: Tensor

    def __setstate__(self, state: Any) -> None:
        pytest.fail("nothing of the file is run")


class Harmful:
    def __reduce__(self) -> Any:
        return shutil.copy, ("step_50", "harm")


def eqr_checkpoint() -> dict[str, Any]:
    """As EqR saves: all that a run continues from."""
    configuration = OmegaConf.create({"lambda_": 0.95, "evaluators": []})
    configuration._metadata.resolver_cache = defaultdict(dict)
    return {
        "step": 50,
        "model": OrderedDict((f"_orig_mod.{name}", value) for name, value in trained(5).items()),
        "optimizers": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}],
        "carry": Carry(torch.ones(1, 2)),
        "rng": {"torch": torch.get_rng_state(), "cuda": None},
        "numpy": np.random.get_state(),  # noqa: NPY002
        "config": {"arch": configuration},
        "ema": {
            "mu": 0.999,
            "shadow": {f"_orig_mod.{name}": value for name, value in averaged().items()},
        },
    }


def test_eqr_is_evaluated_with_its_averages(imported: Import) -> None:
    read = imported(eqr_checkpoint(), kind="averaged weights")
    assert_same(read, trained(5) | averaged())
    assert_same(imported(eqr_checkpoint(), "--raw"), trained(5))


@pytest.mark.parametrize(
    "held",
    [
        {"ema": averaged()},
        {"ema_shadow": averaged()},
        {"ema_model_state_dict": trained(5) | averaged()},
        {"schema": {"version": 1}, "model_ema": trained(5) | averaged()},
        {"ema": averaged() | {"decay": 0.999}},
        {"ema": None},
    ],
)
@pytest.mark.parametrize("key", ["model", "model_state_dict"])
def test_forks_of_trm_keep_averages_under_several_names(
    key: str, held: dict[str, Any], imported: Import
) -> None:
    has_any = held != {"ema": None}
    read = imported(
        {key: trained(5), **held, "step": 50}, kind="averaged weights" if has_any else "weights"
    )
    assert_same(read, trained(5) | (averaged() if has_any else {}))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1", "arch=trm arch.L_cycles=4"),
        ("hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1", "arch=hrm arch.L_cycles=4"),
        ("recursive_reasoning.transformers_baseline@Model_ACTV2", ""),
    ],
)
def test_keys_of_the_configuration_beside_it_are_told(
    name: str, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other cycles or positions fit the same weights."""
    arch = {"L_cycles": 4, "loss": {"loss_type": "x"}, "name": name, "pos_encodings": "none"}
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump({"arch": arch, "lr": 1e-4}))
    torch.save(trained(5), tmp_path / "step_50")
    said = told(capsys, "import", tmp_path / "step_50", tmp_path / "out")
    expected = f" with {keys} arch.pos_encodings=none" if keys else ""
    assert said.endswith(f"init_from={tmp_path}/out{expected}\n")


@pytest.mark.parametrize(
    ("text", "told_of"),
    [
        ("H_cycles: $(touch CANARY)", " (left out of all_config.yaml: H_cycles)"),
        ("'a=1; touch B #': 1", " (left out of all_config.yaml: 'a=1; touch B #')"),
        ("l: [a b]", " (left out of all_config.yaml: l)"),
        ("l: [1, null, x]", " 'arch.l=[1,null,x]'"),
        ("b: true", " arch.b=true"),
    ],
)
def test_a_configuration_is_told_as_words_for_a_shell(
    text: str, told_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all_config.yaml").write_text(f"arch:\n  name: a.trm@X\n  {text}\n")
    torch.save(trained(5), tmp_path / "step_50")
    said = told(capsys, "import", tmp_path / "step_50", tmp_path / "a b")
    assert said.endswith(f" or 'init_from={tmp_path}/a b' with arch=trm{told_of}\n")


def test_nothing_that_a_file_names_is_run(
    imported: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_same(imported({"model": trained(5), "config": Harmful()}), trained(5))
    assert names(tmp_path) == {"step_50", "out"}


class Blocked:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": Blocked()}, "is not a state dict of tensors (it names posix.mkdir)"),
        ({"a": Harmful()}, "a is not a plain tensor (shutil.copy); give a state dict"),
        (nn.Linear(2, 2), "is a torch.nn.modules.linear.Linear, or empty; a state dict is read"),
        (None, "cannot be read (not a plain file)"),
        ([torch.ones(2)], "is a list, or empty; a state dict is read"),
        ({"model": {}, "step": 3}, "holds no tensors; a state dict is read"),
        ({"a": torch.ones(1), "step": 3}, "step is not a plain tensor (int)"),
        ({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, "has the same names with and"),
        (
            {"model": {"a": torch.ones(1)}, "ema": {"shadow_params": [torch.ones(1)]}},
            "its averages have other names than its weights; import --raw",
        ),
        (
            {"model": {"a": torch.ones(1)}, "ema": Harmful()},
            "its averages have other names than its weights; import --raw",
        ),
        (
            {"model": {"a": torch.ones(1)}, "ema": {"b": torch.ones(1)}},
            "its averages have other names than its weights; import --raw",
        ),
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
    torch.save(content, "step_50") if content else os.mkfifo("step_50")
    assert told(capsys, "import", "step_50", "out", status=2).startswith(f"step_50: {problem}")
    assert names(tmp_path) == {"step_50"}, "nothing ran, and nothing is left"


def test_weights_that_do_not_fit_are_named_with_the_nearest_layout(tmp_path: Path) -> None:
    for name, layout in (
        ("trm", LAYOUT),
        ("hrm", "arch=hrm arch.hidden_size=16 arch.H_layers=1 arch.L_layers=1"),
        ("trm_mlp", f"{LAYOUT} arch.mlp_t=true arch.pos_encodings=none"),
    ):
        assert layout_of(saved_tensors(make(name))) == layout
    assert layout_of({"a": torch.ones(2)}) == ""
    with pytest.raises(ConfigError, match=f"shape .* there and .* here; .*looks like {LAYOUT}"):
        check_alike({name: torch.ones(7) for name in trained(5)}, trained(5), "model")
