"""Keys typed by signatures: in a net of one's own as in those of this repository."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from pydantic import Field, PositiveInt
from typing_extensions import Doc, TypedDict

from tests.runs import config_of
from utils.command import config, keys
from utils.command.marks import SAME_RUN, Divides, Share
from utils.errors import ConfigError
from utils.ranks.launchers import Launch


class InnerKeys(TypedDict):
    steps: PositiveInt


class MyNet:
    """A user's net: its constructor says what its keys may hold."""

    def __init__(
        self,
        spec: Any,
        width: Annotated[PositiveInt, Doc("of the hidden layer")],
        heads: Annotated[PositiveInt, Divides("width")],
        share: Share = 0.5,
        kind: Literal["one", "two"] = "one",
        bound: Annotated[float, Field(gt=0, lt=2)] | None = None,
        inner: InnerKeys | None = None,
        shown: Annotated[bool, SAME_RUN] = True,
        rates: tuple[float, float] = (0.1, 0.2),
        free: Any = None,
    ) -> None: ...


def checked(**given: Any) -> dict[str, Any]:
    model = keys._model_of(MyNet)
    right = keys._check("arch", {"width": 8, "heads": 2, **given}, model)
    keys._check_divisors("arch", right, model)
    return right


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"width": 0}, "arch.width=0"),
        ({"width": "x"}, "arch.width=x"),
        ({"width": True}, "arch.width=true"),
        ({"width": 1.5}, "arch.width=1.5"),
        ({"width": None}, "arch.width=null"),
        ({"heads": 3}, "arch.heads=3"),
        ({"share": 1.1}, "arch.share=1.1"),
        ({"share": float("nan")}, "arch.share=nan"),
        ({"kind": "three"}, "arch.kind=three"),
        ({"bound": 2.0}, "arch.bound=2.0"),
        ({"inner": {"steps": 0}}, "arch.inner.steps=0"),
        ({"inner": {"stepz": 1}}, "arch.inner"),
        ({"shown": 1}, "arch.shown=1"),
        ({"rates": [0.1]}, "arch.rates"),
        ({"wdth": 3}, "arch.wdth=3"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(**given)
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


def test_right_values_have_the_proper_type() -> None:
    right = checked(width=8.0, share=1, bound=1, inner={"steps": 2}, rates=[1, 0.5], free={"a": 1})
    assert (right["width"], type(right["width"])) == (8, int)
    assert (right["share"], type(right["share"])) == (1.0, float)
    assert right["inner"] == {"steps": 2}
    assert right["rates"] == (1.0, 0.5)


def test_marks_and_help_are_those_of_the_signature() -> None:
    fields = dict(keys._fields("arch.", keys._model_of(MyNet)))
    assert keys.about(fields["arch.width"]) == "of the hidden layer"
    assert keys.type_text(fields["arch.bound"].annotation) == "float | null"
    assert keys.type_text(fields["arch.kind"].annotation) == "one | two"
    assert keys.is_marked("arch.shown", fields, SAME_RUN)
    assert not keys.is_marked("arch.width", fields, SAME_RUN)
    assert "arch.inner.steps" in fields


@pytest.mark.parametrize("group", keys.GROUPS)
def test_every_option_has_right_defaults(group: str) -> None:
    """Also files that no test trains."""
    for file in sorted((keys.CONF / group).glob("*.yaml")):
        made = config_of(f"{group}={file.stem}", "max_steps=1")
        assert made[group]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lrr", "lr"),
        ("global_batchsize", "global_batch_size"),
        ("hidden_size", "arch.hidden_size"),
        ("arch.hiden_size", "arch.hidden_size"),
        ("label_smoothing", "arch.loss.label_smoothing"),
        ("batch_size", "global_batch_size"),
        ("LR", "lr"),
    ],
)
def test_the_nearest_key_is_named(key: str, near: str) -> None:
    assert near in keys.unknown(key)


def test_a_new_key_with_a_default_does_not_rename_old_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(*overrides: str) -> str:
        with initialize_config_dir(str(keys.CONF), **keys.VERSION):
            raw = compose("pretrain", list(overrides), return_hydra_config=True)
            return config.resolve(raw, raw.hydra.runtime.choices, Launch()).run_name

    before = {each: name(*each.split()) for each in ("", "seed=1", "arch=trm lr=1e-3")}
    assert len({*before.values()}) == 3
    # as if the net had not had this key then
    shutil.copytree(keys.CONF, tmp_path / "conf")
    monkeypatch.setattr(keys, "CONF", tmp_path / "conf")
    file = tmp_path / "conf" / "arch" / "trm.yaml"
    file.write_text(file.read_text().replace("  no_ACT_continue: true\n", ""))
    assert {each: name(*each.split()) for each in before} == before


def test_generic_code_names_no_key_of_one_task() -> None:
    words = ("H_cycles", "vocab_size", "puzzle_identifiers", "latents")
    for file in (keys.ROOT / "utils" / "command").glob("*.py"):
        assert not any(word in file.read_text() for word in words), file
