"""Decompositions end to end: targets that are made first, and what is left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.ranks import check_ended_well, run_ranks, started, until
from tests.runs import (
    EXACT,
    FLOAT32,
    GPT_COMPONENTS,
    QUIET,
    STOPPED,
    TINY_COMPONENTS,
    Once,
    assert_same_bits,
    digest,
    stopped,
    train,
)

FIRST = (
    "experiment=tms_target global_batch_size=64 max_steps=60 data.probability=0.3 data.held_out=64"
    " checkpoint_path={folder}/target"
)


@pytest.mark.slow
def test_components_are_listed_with_what_needs_them(
    tms_target: Path, gpt_target: Path, once: Once
) -> None:
    run = once(*TINY_COMPONENTS, f"arch.target={tms_target}")
    text = (run.directory / "evaluations/step_23/features/components.tsv").read_text()
    assert len(text.splitlines()) == 1 + 2 * 8
    run = once(*GPT_COMPONENTS, f"arch.target={gpt_target}")
    table = (run.directory / "evaluations/step_23/val/components.tsv").read_text().splitlines()
    assert table[0].split("\t")[4:] == ["top tokens", "contexts"]
    assert len(table) == 1 + 8 * 6
    assert any('"' in line.split("\t")[4] for line in table[1:]), "tokens are shown as text"


@pytest.mark.slow
def test_exact_runs_are_equal_to_the_bit_and_go_on_at_other_ranks(tmp_path: Path) -> None:
    """The targets as well, each trained by as many ranks as decompose it."""

    def arguments(name: str) -> list[str]:
        target = f"arch.target='{FIRST.format(folder=tmp_path / name)}'"
        return [*TINY_COMPONENTS, target, *EXACT, "log_interval=4"]

    one = train(tmp_path / "one" / "run", *arguments("one"))
    two = train(tmp_path / "two" / "run", *arguments("two"), ranks=2)
    assert digest(tmp_path / "two" / "target") == digest(tmp_path / "one" / "target")
    assert digest(two.directory) == digest(one.directory)
    stopped(tmp_path / "run", *arguments("one"), ranks=4)
    assert_same_bits(train(tmp_path / "run", *arguments("one"), ranks=2), one)


@pytest.mark.slow
def test_an_interrupted_target_goes_on_and_is_not_made_again(tmp_path: Path) -> None:
    first = FIRST.format(folder=tmp_path).replace(
        "max_steps=60", "max_steps=3000 checkpoint_interval=500 log_interval=100"
    )
    arguments = [*TINY_COMPONENTS, f"arch.target='{first}'", *FLOAT32]
    command = ["pretrain.py", *QUIET, *arguments, f"checkpoint_path={tmp_path}/run"]
    latest = tmp_path / "target" / "checkpoints" / "latest"
    with started([sys.executable, *command]) as process:
        assert until(latest.exists, 60)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out + err
    assert "the same command goes on from there" in err
    assert not (tmp_path / "run" / "checkpoints").exists()
    check_ended_well(run_ranks(2, command, 120))
    assert "continued at step" in (tmp_path / "target" / "log.txt").read_text()
    before = latest.parent.parent.joinpath("metrics.jsonl").stat()
    whole = train(tmp_path / "whole", *arguments)
    assert f"target: {tmp_path}/target" in (whole.directory / "config.yaml").read_text()
    stopped(tmp_path / "again", *arguments)
    again = train(tmp_path / "again", *arguments)
    assert "continued at step 10" in (again.directory / "log.txt").read_text()
    assert_same_bits(again, whole)
    assert latest.parent.parent.joinpath("metrics.jsonl").stat() == before, (
        "the target was made again"
    )
