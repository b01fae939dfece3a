"""The start of a run: afresh, where it ended, at a checkpoint; and what it must not do unasked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tests.ranks import ROOT, check_ended_well, clean_env, run_line, run_ranks, words
from tests.runs import (
    FLOAT32,
    INTERRUPTED,
    QUIET,
    STOPPED,
    TINY_CNN,
    TINY_TRM,
    TROUBLED,
    Result,
    digest,
    faulty,
    status,
    stopped,
    train,
)
from tests.utils.checkpoint.helpers import declare
from utils.rundir.folders import MARK, lock, unlock

# a step that changes no weight
STILL = [*INTERRUPTED, "max_steps=1", "lr=0", "puzzle_emb_lr=0", "weight_decay=0"]


def refusal(directory: Path, *arguments: str) -> str:
    """The line with which a start is refused."""
    (done,) = run_ranks(1, ["pretrain.py", *QUIET, f"checkpoint_path={directory}", *arguments])
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    return done.stderr


def assert_same_weights(one: Result, other: Result) -> None:
    assert_close(one.weights(), other.weights(), rtol=0, atol=0)


@pytest.fixture
def copied(undisturbed: Result, tmp_path: Path) -> Path:
    """A run that a test may damage."""
    return shutil.copytree(undisturbed.directory, tmp_path / "run")


def test_a_warm_up_longer_than_the_run_is_said(tmp_path: Path) -> None:
    tiny = [*TINY_TRM, "epochs=null", "eval_interval=null", "max_steps=2"]
    line = "the learning rate still rises in the last step, 2 (lr_warmup_steps=9)"
    assert line in train(tmp_path / "a", *tiny, "lr_warmup_steps=9").stdout
    assert "still rises" not in train(tmp_path / "b", *tiny, "lr_warmup_steps=1").stdout


def test_a_finished_run_says_so(undisturbed: Result) -> None:
    before = digest(undisturbed.directory)
    metrics = (undisturbed.directory / "metrics.jsonl").read_text()
    (undisturbed.directory / "status.json").write_text('{"state": "running"}')
    again = train(undisturbed.directory, *INTERRUPTED)
    assert "is finished, 23 steps" in again.stdout
    log = (undisturbed.directory / "log.txt").read_text()
    assert " parameters, 23 steps on generated Sudoku; best: highest eval/exact_accuracy\n" in log
    assert status(undisturbed.directory)["state"] == "finished", (
        "a crash between the last checkpoint and the last word is made up for"
    )
    assert digest(undisturbed.directory) == before
    assert (undisturbed.directory / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_the_last_step_is_saved_before_its_evaluation(tmp_path: Path) -> None:
    """An evaluation that fails leaves the trained weights; the same command does what is left."""
    short = [*TINY_TRM, *FLOAT32, "max_steps=3", "eval_interval=null"]
    (done,) = faulty(tmp_path / "run", "raise@predict", 0, 0, *short)
    assert done.returncode == 1
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_3\n"
    again = train(tmp_path / "run", *short)
    assert "held out" in again.stdout
    assert digest(tmp_path / "run") == digest(train(tmp_path / "undisturbed", *short).directory)


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(undisturbed: Result, tmp_path: Path) -> None:
    """With a constant learning rate it is the run that was longer from the start."""
    short = train(tmp_path / "run", *INTERRUPTED, "max_steps=9")
    longer = train(short.directory, *INTERRUPTED)
    assert {row["step"] for row in longer.rows} > {23, 9}
    assert_same_weights(longer, undisturbed)
    assert "is already at step 23" not in longer.stdout


@pytest.mark.parametrize(
    ("change", "then"),
    [
        ("arch.L_cycles=3", "arch.L_cycles=2"),
        pytest.param("lr=3e-3", "lr=0.01", marks=pytest.mark.slow),
        pytest.param("seed=5", "seed=0", marks=pytest.mark.slow),
        pytest.param("shards=4", "shards=8", marks=pytest.mark.slow),
        pytest.param("exact=true", "exact=false", marks=pytest.mark.slow),
    ],
)
def test_a_change_that_would_make_it_another_run_is_refused(
    undisturbed: Result, change: str, then: str
) -> None:
    line = refusal(undisturbed.directory, *INTERRUPTED, change)
    key, value = change.split("=")
    assert f"{key}={value.replace('3e-3', '0.003')}: " in line
    assert f"has {then};" in line


@pytest.mark.slow
def test_changes_that_do_not_touch_the_run_are_accepted(
    undisturbed: Result, tmp_path: Path
) -> None:
    stopped(tmp_path / "run", *INTERRUPTED)
    changes = words("""
        log_interval=7 num_workers=0 timeout_s=33 keep=3 eval_save_outputs=[answer]
        checkpoint_interval=5 on_nonfinite=skip
    """)
    again = train(tmp_path / "run", *INTERRUPTED, *changes)
    assert_same_weights(again, undisturbed)


@pytest.mark.slow
def test_resume_false_moves_the_former_run_aside(tmp_path: Path) -> None:
    stopped(tmp_path / "run", *INTERRUPTED)
    again = train(tmp_path / "run", *INTERRUPTED, "max_steps=3", "resume=false")
    assert [row["step"] for row in again.rows if "train/loss" in row] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
    assert digest(tmp_path / "run.old-1")


@pytest.mark.slow
def test_resume_path_goes_on_there_and_then_from_its_own(
    undisturbed: Result, tmp_path: Path
) -> None:
    stopped(tmp_path / "run", *INTERRUPTED)
    path = f"resume={tmp_path}/run"
    done = faulty(tmp_path / "other", "SIGTERM@objective", 0, 4, *INTERRUPTED, path)
    assert done[0].returncode == STOPPED
    assert (tmp_path / "other" / "checkpoints" / "latest").read_text() == "step_15\n"
    train(tmp_path / "run", *INTERRUPTED, "max_steps=11")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "gone")
    again = train(tmp_path / "other", *INTERRUPTED, path)
    assert again.rows[0]["step"] == 12, (
        "it goes on from its own, whatever has become of the one that it came from"
    )
    assert digest(again.directory) == digest(undisturbed.directory)
    assert not (tmp_path / "other.old-1").exists()


def test_a_run_without_a_whole_checkpoint_is_not_begun_again_unasked(
    undisturbed: Result, tmp_path: Path
) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "run")
    for file in run.glob("checkpoints/step_*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    line = refusal(run, *INTERRUPTED)
    assert line.startswith(f"error: checkpoint_path={run}: no checkpoint there is whole; ")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_init_from_takes_the_weights_alone(undisturbed: Result, tmp_path: Path) -> None:
    fresh = train(tmp_path / "run", *STILL, f"init_from={undisturbed.directory}")
    assert_same_weights(fresh, undisturbed)
    assert fresh.rows[0]["step"] == 1


@pytest.mark.slow
def test_init_from_with_another_number_of_puzzles(undisturbed: Result, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(undisturbed.directory / "checkpoints" / "step_23" / "model.safetensors")
    table = "model.inner.puzzle_emb.weights"
    tensors[table] = torch.arange(3.0)[:, None] + torch.zeros(3, tensors[table].shape[1])
    save_file(tensors, source / "model.safetensors")
    run = train(tmp_path / "run", *STILL, f"init_from={source}/model.safetensors")
    assert "has 3 rows there and" in run.stdout
    assert torch.equal(run.weights()[table], torch.ones_like(run.weights()[table]))


def spoil(checkpoints: Path, step: int) -> None:
    """Whole by its manifest, and of another net: all slots remember one number too many."""
    folder = checkpoints / f"step_{step}"
    for file in folder.glob("shards.*"):
        tensors = load_file(file)
        wider = {
            name: torch.cat([tensor, tensor[:, :, :1]], 2)
            for name, tensor in tensors.items()
            if tensor.ndim == 3
        }
        assert wider
        save_file({**tensors, **wider}, file)
    declare(folder)


def test_a_checkpoint_that_does_not_fit_is_one_line(copied: Path) -> None:
    spoil(copied / "checkpoints", 23)
    line = refusal(copied, *INTERRUPTED)
    assert line.startswith(
        f"error: checkpoint_path={copied}: no checkpoint there can be used: step_23 "
    )
    assert "has shape (3, 17, 17) there and (3, 17, 16) here" in line
    assert line.endswith("add resume=false to move all that aside and begin again\n")


def test_a_checkpoint_of_another_version_is_one_line(copied: Path, tmp_path: Path) -> None:
    for step in (copied / "checkpoints").glob("step_*"):
        meta = json.loads((step / "meta.json").read_text())
        del meta["data"]
        (step / "meta.json").write_text(json.dumps(meta))
        declare(step)
    line = refusal(copied, *INTERRUPTED)
    assert line.startswith(f"error: checkpoint_path={copied}: written by another version, ")
    line = refusal(tmp_path / "other", f"resume={copied}", *INTERRUPTED)
    assert line.startswith(f"error: resume={copied}")
    assert "another version" in line


@pytest.mark.slow
def test_two_ranks_go_back_together(undisturbed_pair: Result, tmp_path: Path) -> None:
    """A meta that is damaged, and before it one that does not fit: both ranks take the one before
    that.
    """
    run = shutil.copytree(undisturbed_pair.directory, tmp_path / "run")
    for step in (21, 22):
        shutil.copytree(run / "checkpoints" / "step_20", run / "checkpoints" / f"step_{step}")
        meta = run / "checkpoints" / f"step_{step}" / "meta.json"
        meta.write_text(meta.read_text().replace('"step": 20', f'"step": {step}'))
    # its manifest knows another meta
    for step in (21, 23):
        spoil(run / "checkpoints", step)
    again = train(run, *TROUBLED, ranks=2)
    assert "checkpoint step_23 does not fit" in again.stdout
    assert (
        "checkpoint step_22 is damaged (meta.json: sha256 differs); going back to the one before"
        in again.stdout
    )
    assert "going back to step_20" in again.stdout
    assert digest(run) == digest(undisturbed_pair.directory)
    spoil(run / "checkpoints", 23)
    for ranks in (1, 2):
        done = run_ranks(ranks, ["pretrain.py", *QUIET, f"checkpoint_path={run}", *TROUBLED])
        assert {rank.returncode for rank in done} == {2}
        assert "".join(rank.stderr for rank in done).count("\n") == 1
        assert "no checkpoint there can be used: step_23 " in done[0].stderr


# ---- beside a live run, which owns its directory

SMALL = [*TINY_CNN, *QUIET, "max_steps=3", "num_workers=0", "project_name=p"]


@contextmanager
def held(run: Path) -> Iterator[None]:
    its = lock(run)
    assert its is not None
    try:
        yield
    finally:
        unlock(its)


def test_a_start_beside_a_live_run_is_refused_before_it_reads_anything(tmp_path: Path) -> None:
    damaged = tmp_path / "x" / "checkpoints" / "step_5"
    damaged.mkdir(parents=True)  # a reader would have something to say about it
    (tmp_path / "x" / "config.yaml").write_text(MARK)
    with held(tmp_path / "x"):
        paths = f"data_path={tmp_path}", f"checkpoint_path={tmp_path}/x"  # there is no dataset
        done = run_ranks(2, ["pretrain.py", *SMALL, *paths])
    assert [rank.returncode for rank in done] == [2, 2]
    said = f"checkpoint_path={tmp_path}/x: another run (which has just begun) writes there"
    assert said in done[0].stderr
    assert sum(rank.stderr.count("\n") for rank in done) == 1
    assert done[0].stdout == ""
    assert os.listdir(tmp_path) == ["x"]
    assert {*os.listdir(tmp_path / "x")} == {"checkpoints", "config.yaml"}


@pytest.mark.slow
def test_an_evaluation_leaves_the_training_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "p"
    check_ended_well(run_line([*SMALL, "run_name=x"], tmp_path))
    before = digest(folder / "x")
    with held(folder / "x"):  # as while it is being trained
        for _ in range(2):
            evaluates = ["run_name=x", "eval_only=true", "checkpoint=runs/p/x"]
            check_ended_well(run_line([*SMALL, *evaluates], tmp_path))
    assert sorted(os.listdir(folder)) == ["x", "x-evaluation", "x-evaluation-2"]
    assert all(
        len(Result(folder / f"x-evaluation{number}").series("eval/accuracy")) == 1
        for number in ("", "-2")
    )
    assert digest(folder / "x") == before
    assert status(folder / "x")["state"] == status(folder / "x-evaluation")["state"] == "finished"


def test_threads_that_wait_leave_their_core_to_others() -> None:
    command, env = [sys.executable, "-c", "import pretrain"], clean_env(OMP_DISPLAY_ENV="verbose")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("PyTorch has another OpenMP here")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
