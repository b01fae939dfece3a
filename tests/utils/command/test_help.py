"""`--help` describes every key, and a key that does not exist is answered with a near one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_line
from tests.test_bad_input import assert_one_line
from utils.command import keys
from utils.command.help import answer
from utils.errors import ConfigError


def test_help_lists_every_key_that_can_be_set() -> None:
    text = answer(["arch=gpt", "data=tokens", "--help"])
    for key in ("data_path", "lr", "wandb.mode", "arch.num_layers", "data.seq_len", "max_tokens"):
        assert f"\n  {key} " in text, key
    assert "largest global gradient norm" in text, "with its description"
    assert "\nCheckpoints\n  resume " in text, "below the comment that heads it"
    assert "false: begin again" in " ".join(text.split()), "all lines of a description"
    assert "sync.shards" not in text, "what follows another key is set there"
    assert "arch=" in text
    assert "(here gpt)" in text
    assert max(map(len, text.splitlines())) <= 140


def test_help_of_an_experiment_shows_what_it_chooses() -> None:
    assert "arch.qk_norm" in answer(["--help", "experiment=lm"])
    assert "arch.C " in answer(["-h", "experiment=tms_5_2_paper"]), "through one that it builds on"


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("grad_clip", "grad_clip=null a number, a group of keys or null; more than 0 largest"),
        ("keep", "any start may change it"),
        ("epochs", "a run with a run_name of its own goes on with it"),
        ("sync.shards", "sync.shards always has the value of shards; set shards instead"),
        ("arch.hidden_size", "arch.hidden_size=512 (arch=hrm)"),
        ("arch.hidden_size", "arch.hidden_size=256 (arch=gpt)"),
        ("sweep", " sweep.jobs "),
        ("arch.loss", "arch.loss (arch=gpt) arch.loss.chunk_tokens "),
        ("arch", " gpt "),
        ("arch", "Keys of arch=hrm "),
        ("experiment", " demo "),
    ],
)
def test_help_for_one_thing(topic: str, says: str) -> None:
    assert says in " ".join(answer(["--help", topic]).split()), "however its lines break"


def test_help_cuts_no_sentence(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# python pretrain.py experiment=mine\n"
        "# An hour. About\n# 1.5 GB, mostly.\n# A detail.\nseed: 1\n"
    )
    text = answer(["--help", "experiment", f"--config-dir={tmp_path}"])
    assert "  mine              An hour. About 1.5 GB, mostly.\n" in text


def test_help_for_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^--help learn: unknown key; --help lists the keys$"):
        answer(["--help", "learn"])
    with pytest.raises(ConfigError, match=r"^arch=hmr: unknown; choose one of cnn, "):
        answer(["--help", "arch=hmr"])


def test_help_knows_what_another_folder_adds(tmp_path: Path) -> None:
    (tmp_path / "arch").mkdir()
    (tmp_path / "arch" / "mine.yaml").write_text("# My net\nwidth: 3  # [>= 1] of all\n")
    text = answer(["--help", "arch=mine", f"--config-dir={tmp_path}"])
    assert "arch=mine: My net\n  arch.width " in text


def test_help_is_printed_once_and_is_no_error(tmp_path: Path) -> None:
    ranks = run_line(["--help", "lr"], tmp_path, 2)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert ranks[0].stdout.startswith("lr=0.0001\n    a number; at least 0")
    assert (ranks[1].stdout, ranks[0].stderr) == ("", "")
    assert_one_line(run_line(["--help", "lrr"], tmp_path, 2), "--help lrr: unknown key; did you")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("data.nosuch", ""),
        ("arch.nosuch", ""),
        ("seeed", "seed"),
        ("hidden_size", "arch.hidden_size"),
        ("data.path", "data_path"),
        ("model.num_layer", "arch.num_layers"),
        ("epoch", "epochs"),
        ("batch_size", "global_batch_size"),
        ("max_step", "max_steps"),
        ("wandb.moode", "wandb.mode"),
        ("LR", "did you mean lr?"),
        ("lr.x", "unknown key; --help lists the keys"),
    ],
)
def test_the_nearest_key_is_one_that_may_have_been_meant(key: str, near: str) -> None:
    said = keys.unknown(key)
    section = key.partition(".")[0]
    assert (near in said) if near else said == f"unknown key; --help {section} lists the keys there"
