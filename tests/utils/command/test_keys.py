"""Keys typed by signatures. tests/test_bad_input.py has more values that are refused."""

from __future__ import annotations

import pytest

from tests.runs import config_of
from utils.command import keys
from utils.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("arch.hidden_size=true", "arch.hidden_size=true: must be a valid integer"),
        ("arch.hidden_size=null", "arch.hidden_size=null: must be"),
        ("arch.halt_exploration_prob=1.1", "arch.halt_exploration_prob=1.1: must be less"),
        ("+data.embedded.siez=4", "data.embedded.siez=4: unknown key; did you mean"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("arch=trm", override)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


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
        ("hidden_size", "arch.hidden_size"),
        ("LR", "lr"),
    ],
)
def test_the_nearest_key_is_named(key: str, near: str) -> None:
    assert near in keys.unknown(key)
