"""A config can name what this repository defines, in the places where something is made, and
nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from utils.command import keys
from utils.command.instantiate import check_special, find, make
from utils.errors import ConfigError

SGD = "optim.builtin.sgd"


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "data.recursive.puzzles.PuzzleSource",  # another group's
        "optim.builtin",
        "optim.builtin.torch.load",
        "optim.builtin.ConfigError",  # imported there
        "optim.builtin.__builtins__.eval",
        "optim.builtin.sgd.__globals__",
        "optim.adam_atan2.AdamATan2.step",  # defined in a class
        "optim.groups._spare_the_compiler",
        "optim..builtin.sgd",
        "optim./../os.system",
        "optim.builtin.ѕgd",  # not a Latin s
        "",
        None,
        ["optim.builtin.sgd"],
    ],
)
def test_only_what_is_defined_here_can_be_made(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optim\.schedule") as caught:
        make({"_target_": target}, "optim.schedule")
    assert "\n" not in str(caught.value)


def test_builders_of_datasets_are_no_targets() -> None:
    for target in ("data.build.sudoku.main", "data.build.common.anything", "data.build"):
        with pytest.raises(ConfigError, match="only things of this repository"):
            find("data", target)


@pytest.mark.parametrize(
    "value",
    [
        {"_target_": "os.makedirs", "name": "MADE"},
        [{"_target_": "os.makedirs", "name": "MADE"}],
        {"deep": [{"er": ({"_target_": "os.makedirs", "name": "MADE"},)}]},
        {"_anything_": 1},
    ],
)
def test_nothing_nested_is_made(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^optim\.dense\[0\]\.optimizer: optim\.builtin\.sgd\(lr="
    ):
        # values are handed over as they are
        make({"_target_": SGD, "lr": value}, "optim.dense[0].optimizer", [])
    assert not (tmp_path / "MADE").exists()


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (
            "optim.dense",
            [{"match": ".*", "optimizer": {"lr": {"_target_": "torch.load"}}}],
            "optim.dense[0].optimizer.lr._target_=torch.load",
        ),
        (
            "optim.dense",
            [{"match": ".*", "optimizer": {"_target_": "torch.load"}}],
            "optim.dense[0].optimizer._target_=torch.load",
        ),
        ("optim.dense", [{"_target_": SGD}], "optim.dense[0]._target_=optim.builtin.sgd"),
        (
            "optim.dense",
            [{"optimizer": {"_target_": SGD, "_args_": [1]}}],
            "optim.dense[0].optimizer._args_",
        ),
        ("arch.dropout", [{"_target_": "torch.load"}], "arch.dropout[0]._target_=torch.load"),
        ("data.embedded", {"a": [[{"_call_": 1}]]}, "data.embedded.a[0][0]._call_=1"),
    ],
)
def test_a_stray_key_is_named_by_its_whole_path(path: str, value: Any, where: str) -> None:
    def check(value: Any) -> None:
        for inner, leaf in keys.leaves(value, path):
            check_special(inner, leaf)

    with pytest.raises(ConfigError) as caught:
        check(value)
    assert str(caught.value).startswith(f"{where}")


def test_memory_that_cannot_be_had_is_said() -> None:
    width = 2**40
    with pytest.raises(ConfigError, match=r"^arch: models\.layers\.Linear.* make it smaller"):
        make({"_target_": "models.layers.Linear", "width_in": width, "width_out": width}, "arch")
