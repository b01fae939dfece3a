"""Decompositions end to end: the same run at any number of ranks, targets that are made first, and
what is left behind.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, check_ended_well, run_ranks, until
from tests.runs import (
    FLOAT32,
    QUIET,
    STOPPED,
    Result,
    assert_same_run,
    digest,
    learned,
    stopped,
    train,
)

slow = pytest.mark.slow
# every loss, so that every kind of noise counts
LOSSES = [
    "arch.loss.warmup_steps=10",
    "arch.loss.subset=1",
    "arch.loss.minimality=1e-2",
    "arch.loss.p=2",
    "arch.loss.p_end=0.9",
    "grad_clip=2",
]
TMS = [
    "experiment=tms_5_2",
    "arch.forward_dtype=float64",
    "global_batch_size=48",
    "max_steps=23",
    "data.held_out=100",
    "eval_every_steps=null",
    "data.probability=0.3",
    "arch.C=8",
    "eval_batch_size=16",
]
FIRST = (
    "experiment=tms_target global_batch_size=64 max_steps=60 data.probability=0.3 data.held_out=64"
    " checkpoint_path={folder}/target"
)


@pytest.fixture(scope="module")
def tms(tms_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A decomposition on one rank."""
    return train(tmp_path_factory.mktemp("tms") / "run", *TMS, *LOSSES, f"arch.target={tms_target}")


@slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ["micro_batch_size=12"]),
        (3, ["sync=ddp", "sync.find_unused_parameters=true", "micro_batch_size=12"]),
        (2, ["sync=fsdp"]),
    ],
)
def test_the_number_of_ranks_changes_nothing(
    ranks: int, more: list[str], tms: Result, tms_target: Path, tmp_path: Path
) -> None:
    other = train(tmp_path / "run", *TMS, *LOSSES, f"arch.target={tms_target}", *more, ranks=ranks)
    assert_same_run(tms, other)
    losses = tms.series("train/loss")
    assert losses[-1] < 0.9 * losses[0], "it learns nothing: the test shows little"
    rows = [
        (run.directory / "evaluations/step_23/features/components.tsv").read_text()
        for run in (tms, other)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 1 + 2 * 8


@slow
def test_exact_runs_are_equal_to_the_bit_and_go_on_at_other_ranks(tmp_path: Path) -> None:
    """The targets as well, each trained by as many ranks as decompose it."""

    def arguments(name: str) -> list[str]:
        return [
            *TMS,
            *LOSSES,
            f"arch.target='{FIRST.format(folder=tmp_path / name)}'",
            *FLOAT32,
            "exact=true",
            "log_interval=4",
        ]

    one = train(tmp_path / "one" / "run", *arguments("one"))
    two = train(tmp_path / "two" / "run", *arguments("two"), ranks=2)
    assert digest(tmp_path / "two" / "target") == digest(tmp_path / "one" / "target")
    assert digest(two.directory) == digest(one.directory)
    stopped(tmp_path / "run", *arguments("one"), ranks=4)
    again = train(tmp_path / "run", *arguments("one"), ranks=2)
    assert digest(again.directory) == digest(one.directory)
    assert learned(again) == learned(one)


@slow
def test_a_language_model_is_taken_apart_the_same_at_any_number_of_ranks(
    gpt_target: Path, tmp_path: Path
) -> None:
    arguments = [
        "experiment=decompose_lm",
        f"arch.target={gpt_target}",
        "arch.forward_dtype=float64",
        "arch.C=6",
        "data.seq_len=16",
        "data.val_tokens=500",
        "data.embedded.mebibytes=1",
        "tokens_per_update=null",
        "global_batch_size=24",
        "max_steps=23",
        "arch.loss.layerwise=1",
        "eval_every_steps=10",
        "eval_batch_size=8",
    ]
    one = train(tmp_path / "1", *arguments)
    file = "evaluations/step_23/val/components.tsv"
    text = (one.directory / file).read_text()
    for ranks in (2, 3):
        other = train(tmp_path / str(ranks), *arguments, "micro_batch_size=6", ranks=ranks)
        assert_same_run(one, other)
        assert (other.directory / file).read_text() == text
    table = text.splitlines()
    assert table[0].split("\t")[4:] == ["top tokens", "contexts"]
    assert len(table) == 1 + 8 * 6
    assert any('"' in line.split("\t")[4] for line in table[1:]), "tokens are shown as text"


@slow
def test_an_interrupted_target_goes_on_and_is_not_made_again(tmp_path: Path) -> None:
    first = FIRST.format(folder=tmp_path).replace(
        "max_steps=60", "max_steps=3000 checkpoint_interval=500 log_interval=100"
    )
    arguments = [*TMS, f"arch.target='{first}'", *FLOAT32]
    command = ["pretrain.py", *QUIET, *arguments, f"checkpoint_path={tmp_path}/run"]
    latest = tmp_path / "target" / "checkpoints" / "latest"
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
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
    assert digest(again.directory) == digest(whole.directory)
    assert learned(again) == learned(whole)
    assert latest.parent.parent.joinpath("metrics.jsonl").stat() == before, (
        "the target was made again"
    )
