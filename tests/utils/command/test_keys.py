"""Keys typed by signatures: in a net of one's own as in those of this repository."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt
from typing_extensions import Doc, TypedDict

from tests.runs import config_of
from utils.command import keys
from utils.command.marks import SAME_RUN, Divides, Share
from utils.errors import ConfigError


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
        ({"width": None}, "arch.width=null"),
        ({"heads": 3}, "arch.heads=3"),
        ({"share": 1.1}, "arch.share=1.1"),
        ({"share": float("nan")}, "arch.share=nan"),
        ({"kind": "three"}, "arch.kind=three"),
        ({"bound": 2.0}, "arch.bound=2.0"),
        ({"inner": {"steps": 0}}, "arch.inner.steps=0"),
        ({"inner": {"stepz": 1}}, "arch.inner"),
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


@pytest.mark.slow
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
        ("LR", "lr"),
    ],
)
def test_the_nearest_key_is_named(key: str, near: str) -> None:
    assert near in keys.unknown(key)
