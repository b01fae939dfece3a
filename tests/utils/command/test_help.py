"""`--help`: every key with its default, type and meaning."""

from pathlib import Path

import pytest

from tests.ranks import run_line
from tests.runs import config_of
from utils.command import keys
from utils.command.help import answer
from utils.errors import ConfigError


def test_help_lists_every_key_of_the_run() -> None:
    text, config = answer(["--help", "arch=trm"]), config_of()
    for key in keys.Root.model_fields:
        if key in config and key != "experiment":
            assert f"  {key}" in text, key
    for key in ("arch.H_cycles", "arch.loss.label_smoothing", "data.puzzle", "experiment="):
        assert key in text


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("grad_clip", ["grad_clip=null", "float | null"]),
        ("arch.hidden_size", ["arch.hidden_size=512", "int  (≥ 1,"]),
        ("arch.halt_exploration_prob", ["Probability, in each training step"]),
        ("arch.loss", ["arch.loss.loss_type", "stablemax_cross_entropy"]),
        ("experiment", ["demo", "shakespeare"]),
    ],
)
def test_help_for_one_thing(topic: str, says: list[str]) -> None:
    text = answer(["--help", topic])
    assert all(each in text for each in says), text


def test_help_for_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--help lrr: .*lr"):
        answer(["--help", "lrr"])


@pytest.mark.slow
def test_help_is_printed_once_and_is_no_error(tmp_path: Path) -> None:
    done = run_line(["--help"], tmp_path, 2)
    assert {rank.returncode for rank in done} == {0}
    assert sum("usage: " in rank.stdout for rank in done) == 1
