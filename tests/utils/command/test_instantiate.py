"""A config can name what this repository defines, in the places where something is made, and
nothing else.
"""

from typing import Any

import pytest

from utils.command.instantiate import make
from utils.errors import ConfigError


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "data.recursive.puzzles.PuzzleSource",  # another group's
        "optim.builtin",
        "optim.builtin.ConfigError",  # imported there
        "optim.builtin.__builtins__.eval",
        "optim.builtin.sgd.__globals__",
        "optim.adam_atan2.AdamATan2.step",  # defined in a class
        "optim.groups._spare_the_compiler",
        "optim./../os.system",
        "optim.builtin.ѕgd",  # not a Latin s
        None,
    ],
)
def test_only_what_is_defined_here_can_be_made(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optim\.schedule") as caught:
        make({"_target_": target}, "optim.schedule")
    assert "\n" not in str(caught.value)
