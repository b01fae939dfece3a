import pytest
from hydra._internal.utils import get_args_parser

from utils.command.arguments import prepare

OPTIONS = {name for action in get_args_parser()._actions for name in action.option_strings}


@pytest.mark.parametrize("option", sorted(OPTIONS - {"-h", "--help"}))
def test_hydra_s_own_options_are_handed_on(option: str) -> None:
    assert prepare([option]) == [option, "--"]


def test_options_may_stand_anywhere_and_have_their_value_beside_them() -> None:
    expected = ["--cfg", "job", "-m", "--config-dir=conf", "--", "seed=0,1", "~data_paths"]
    arguments = ["--cfg", "job", "seed=0,1", "-m", "~data_paths", "--config-dir=conf"]
    assert prepare(arguments) == expected
