"""The same command continues its run, and the continued run is the undisturbed one: told by digests and logged metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import Completed, run_ranks, succeeded
from tests.runs import EXACT, FLOAT32, QUIET, TINY_CNN, TINY_TRM, Result, digest, faulty, learned, status, torchrun, train

# Stopped after step 10: in the middle of an epoch and of a logging interval, with slots that think on.
TRM = [*TINY_TRM, *FLOAT32, "max_steps=23", "log_interval=4"]
STOPPED = 143


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", *TRM)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("exact") / "run", *TRM, *EXACT)


def stopped(directory: Path, *arguments: str, ranks: int = 1) -> list[Completed]:
    """A run that somebody stops after ten steps."""
    done = faulty(directory, "SIGTERM@objective", "all", 9 * (8 // ranks if "exact=true" in arguments else 1), *arguments, ranks=ranks)
    assert {rank.returncode for rank in done} == {STOPPED}, done[0].stderr
    assert (directory / "checkpoints" / "latest").read_text() == "step_10\n"
    return done


def refusal(directory: Path, *arguments: str) -> str:
    """The line with which a start is refused."""
    (done,) = run_ranks(1, ["pretrain.py", *QUIET, f"checkpoint_path={directory}", *arguments])
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_stopped_run_goes_on_to_the_same_bits(undisturbed: Result, tmp_path: Path) -> None:
    (done,) = stopped(tmp_path / "run", *TRM)
    assert "SIGTERM after step 10: stopped; the same command goes on from there" in done.stderr
    told = status(tmp_path / "run")
    assert (told["state"], told["step"], told["exit_status"]) == ("stopped", 10, STOPPED)
    again = train(tmp_path / "run", *TRM)
    assert digest(again.directory) == digest(undisturbed.directory)
    assert learned(again) == learned(undisturbed)
    assert status(tmp_path / "run")["state"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is moved aside"


@pytest.mark.slow
def test_two_ranks_without_loader_processes_too(tmp_path: Path) -> None:
    one = train(tmp_path / "undisturbed", *TRM, ranks=2)
    stopped(tmp_path / "run", *TRM, "num_workers=0", ranks=2)
    assert digest(train(tmp_path / "run", *TRM, "num_workers=2", ranks=2).directory) == digest(one.directory)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 1), (4, 2), (4, 8), (1, 4)))],
)
def test_exact_runs_go_on_at_any_number_of_ranks(exact: Result, before: int, after: int, tmp_path: Path) -> None:
    stopped(tmp_path / "run", *TRM, *EXACT, ranks=before)
    again = train(tmp_path / "run", *TRM, *EXACT, ranks=after, timeout=200)
    assert digest(again.directory) == digest(exact.directory)
    assert learned(again) == learned(exact)


@pytest.mark.slow
def test_a_fast_run_goes_on_at_three_ranks(tmp_path: Path) -> None:
    """Not to the same bits, but to the same numbers, which float64 shows."""
    arguments = [*TINY_TRM, "max_steps=23", "log_interval=4"]
    one = train(tmp_path / "undisturbed", *arguments)
    stopped(tmp_path / "run", *arguments, ranks=2)
    again = train(tmp_path / "run", *arguments, ranks=3)
    for name, tensor in one.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adadelta", "adamw", "sgd", "muon"])
def test_every_optimizer_remembers(optim: str, tmp_path: Path) -> None:
    net = ["arch=cnn", "data=digits", "global_batch_size=32", "epochs=1", "eval_interval=1"]
    net = net if optim != "muon" else [argument for argument in TRM if not argument.startswith("max_steps")]
    arguments = [*net, f"optim={optim}", "lr=1e-2", "max_steps=6", "num_workers=0", "checkpoint_interval=3", "keep=null"]
    one = train(tmp_path / "run", *arguments)
    two = train(tmp_path / "two", *arguments, f"resume={tmp_path}/run/checkpoints/step_3")
    assert two.rows[0]["step"] == 4
    assert digest(two.directory) == digest(one.directory)


@pytest.mark.slow
def test_evaluation_that_was_cut_short_is_made_up_for(tmp_path: Path) -> None:
    arguments = [*TRM, "epochs=24", "eval_interval=6", "max_steps=20", "eval_batch_size=4"]
    one = train(tmp_path / "undisturbed", *arguments)
    assert len(one.series("eval/accuracy")) == 2
    done = faulty(tmp_path / "run", "SIGUSR1@predict", 0, 3, *arguments)
    assert done[0].returncode == 138, done[0].stderr
    assert status(tmp_path / "run")["state"] == "requeue"
    again = train(tmp_path / "run", *arguments)
    assert learned(again) == learned(one)
    assert digest(again.directory) == digest(one.directory)


def test_a_finished_run_says_so(undisturbed: Result) -> None:
    before, files = digest(undisturbed.directory), (undisturbed.directory / "metrics.jsonl").read_text()
    (undisturbed.directory / "status.json").write_text('{"state": "running"}')
    again = train(undisturbed.directory, *TRM)
    assert "is finished, 23 steps" in again.stdout
    assert status(undisturbed.directory)["state"] == "finished", "a crash between the last checkpoint and the last word is made up for"
    assert digest(undisturbed.directory) == before
    assert (undisturbed.directory / "metrics.jsonl").read_text() == files


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(undisturbed: Result, tmp_path: Path) -> None:
    """With a constant learning rate it is the run that was longer from the start."""
    short = train(tmp_path / "run", *TRM, "max_steps=9")
    longer = train(short.directory, *TRM)
    assert {row["step"] for row in longer.rows} > {23, 9}
    for name, tensor in undisturbed.weights().items():
        assert torch.equal(longer.weights()[name], tensor), name
    assert "is already at step 23" not in longer.stdout
    assert "max_steps=9: that is 9 steps, and the run has done 23" in refusal(short.directory, *TRM, "max_steps=9")


@pytest.mark.parametrize(
    ("change", "then"),
    [
        ("lr=3e-3", "lr=0.01"),
        ("seed=5", "seed=0"),
        ("arch.L_cycles=3", "arch.L_cycles=2"),
        ("shards=4", "shards=8"),
        ("exact=true", "exact=False"),
    ],
)
def test_a_change_that_would_make_it_another_run_is_refused(undisturbed: Result, change: str, then: str) -> None:
    line = refusal(undisturbed.directory, *TRM, change)
    key, value = change.split("=")
    assert f"{key}={value.replace('3e-3', '0.003').replace('true', 'True')}: " in line
    assert f"has {then};" in line


@pytest.mark.slow
def test_changes_that_do_not_touch_the_run_are_accepted(undisturbed: Result, tmp_path: Path) -> None:
    stopped(tmp_path / "run", *TRM)
    changes = [
        "log_interval=7",
        "num_workers=0",
        "timeout_s=33",
        "keep=3",
        "eval_save_outputs=[answer]",
        "checkpoint_interval=5",
        "on_nonfinite=skip",
    ]
    again = train(tmp_path / "run", *TRM, *changes)
    for name, tensor in undisturbed.weights().items():
        assert torch.equal(again.weights()[name], tensor), name


@pytest.mark.slow
def test_resume_false_moves_the_former_run_aside(tmp_path: Path) -> None:
    stopped(tmp_path / "run", *TRM)
    again = train(tmp_path / "run", *TRM, "max_steps=3", "resume=false")
    assert [row["step"] for row in again.rows if "train/loss" in row] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
    assert digest(tmp_path / "run.old-1")
    (restarted,) = run_ranks(
        1, ["pretrain.py", *QUIET, f"checkpoint_path={tmp_path}/run", *TRM, "max_steps=3", "resume=false"],
        env={"TORCHELASTIC_RESTART_COUNT": "1"},
    )  # fmt: skip
    assert "is finished, 3 steps" in restarted.stdout, "what a launcher starts again goes on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]


@pytest.mark.slow
def test_resume_path_goes_on_there_and_then_from_its_own(undisturbed: Result, tmp_path: Path) -> None:
    stopped(tmp_path / "run", *TRM)
    path = f"resume={tmp_path}/run"
    done = faulty(tmp_path / "other", "SIGTERM@objective", 0, 4, *TRM, path)
    assert done[0].returncode == STOPPED
    assert (tmp_path / "other" / "checkpoints" / "latest").read_text() == "step_15\n"
    train(tmp_path / "run", *TRM, "max_steps=11")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "gone")
    again = train(tmp_path / "other", *TRM, path)
    assert again.rows[0]["step"] == 12, "it goes on from its own, whatever has become of the one that it came from"
    assert digest(again.directory) == digest(undisturbed.directory)
    assert not (tmp_path / "other.old-1").exists()


def test_a_path_without_a_whole_checkpoint_is_refused(undisturbed: Result, tmp_path: Path) -> None:
    assert f"resume={tmp_path}/nowhere" in refusal(tmp_path / "run", *TRM, f"resume={tmp_path}/nowhere")
    save_file({"x": torch.ones(1)}, tmp_path / "bare.safetensors")
    assert "init_from" in refusal(tmp_path / "run", *TRM, f"resume={tmp_path}/bare.safetensors")
    assert refusal(tmp_path / "run", *TRM, f"init_from={tmp_path}/bare.safetensors").startswith(f"error: init_from={tmp_path}/bare")


def test_a_run_without_a_whole_checkpoint_is_not_begun_again_unasked(undisturbed: Result, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "run")
    for file in run.glob("checkpoints/step_*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    line = refusal(run, *TRM)
    assert line == f"error: checkpoint_path={run}: no checkpoint there is whole; add resume=false to move all that aside and begin again\n"
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_other_data_is_refused(undisturbed: Result, tmp_path: Path) -> None:
    meta = undisturbed.directory / "config.yaml"
    assert "train: 64" in meta.read_text()
    line = refusal(undisturbed.directory, *TRM, "data.embedded.train=48")
    assert "data.embedded.train=48" in line


@pytest.mark.slow
def test_init_from_takes_the_weights_alone(undisturbed: Result, tmp_path: Path) -> None:
    fresh = train(tmp_path / "run", *TRM, "max_steps=1", "lr=0", "puzzle_emb_lr=0", "weight_decay=0", f"init_from={undisturbed.directory}")
    for name, tensor in undisturbed.weights().items():
        assert torch.equal(fresh.weights()[name], tensor), name
    assert fresh.rows[0]["step"] == 1


@pytest.mark.slow
def test_init_from_with_another_number_of_puzzles(undisturbed: Result, ragged: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(undisturbed.directory / "checkpoints" / "step_23" / "model.safetensors")
    table = "model.inner.puzzle_emb.weights"
    tensors[table] = torch.arange(3.0)[:, None] + torch.zeros(3, tensors[table].shape[1])
    save_file(tensors, source / "model.safetensors")
    run = train(tmp_path / "run", *TRM, "max_steps=1", "lr=0", "puzzle_emb_lr=0", f"init_from={source}/model.safetensors")
    assert "has 3 rows there and" in run.stdout
    assert torch.equal(run.weights()[table], torch.ones_like(run.weights()[table]))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_skipped(undisturbed: Result, tmp_path: Path) -> None:
    arguments = [*TRM, "checkpoint_interval=4"]
    stopped(tmp_path / "run", *arguments)
    file = tmp_path / "run" / "checkpoints" / "step_10" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = train(tmp_path / "run", *arguments)
    assert "step_10 is damaged (optimizer.safetensors" in again.stdout
    assert "continued at step 8" in (tmp_path / "run" / "log.txt").read_text()
    assert digest(again.directory) == digest(undisturbed.directory)
    assert learned(again) == learned(undisturbed)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_begins_again_in_its_place(undisturbed: Result, tmp_path: Path) -> None:
    (done,) = faulty(tmp_path / "run", "kill@objective", 0, 9, *TRM)
    assert done.returncode == -9
    again = train(tmp_path / "run", *TRM)
    assert learned(again) == learned(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    """The best by a metric that grows from step to step is the first; by one that falls, the last."""
    arguments = [*TRM, "epochs=24", "eval_interval=4", "max_steps=60", "lr=1e-3", "keep=1", "objective_metric=eval/lm_loss"]
    run = train(tmp_path / "run", *arguments)
    losses = {row["step"]: row["eval/lm_loss"] for row in run.rows if "eval/lm_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").read_text() == f"step_{best}\n"
    assert {path.name for path in checkpoints.glob("step_*")} == {f"step_{best}", "step_60"}


@pytest.mark.slow
def test_a_sweep_started_again_skips_what_is_finished(tmp_path: Path) -> None:
    sweep = ["-m", "seed=0,1", "max_steps=6", *TINY_TRM, *FLOAT32, *QUIET]
    first = torchrun(1, "seed=0", *sweep[2:], cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    both = torchrun(2, *sweep, cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("is finished, 6 steps") == 1
    runs = sorted((tmp_path / "runs" / "puzzles").iterdir())
    assert len(runs) == 2
    assert {(run / "checkpoints" / "latest").read_text() for run in runs} == {"step_6\n"}
    again = torchrun(2, *sweep, cwd=tmp_path)
    assert again.stdout.count("is finished, 6 steps") == 2


@pytest.mark.slow
def test_the_cnn_with_dropout_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    arguments = [*TINY_CNN, *FLOAT32, "max_steps=20"]
    one = train(tmp_path / "undisturbed", *arguments)
    first = train(tmp_path / "run", *arguments, "max_steps=7", "checkpoint_interval=7")
    assert first.rows
    again = train(tmp_path / "run", *arguments, ranks=1)
    for name, tensor in one.weights().items():
        assert torch.equal(again.weights()[name], tensor), name


@pytest.mark.slow
def test_all_ranks_get_the_same_start(tmp_path: Path) -> None:
    """Rank 0 alone looks at the disk; the others hear of it."""
    stopped(tmp_path / "run", *TRM, ranks=2)
    done = succeeded(run_ranks(2, ["pretrain.py", *QUIET, f"checkpoint_path={tmp_path}/run", *TRM]))
    assert "continued at step 10" in done[0].stdout + (tmp_path / "run" / "log.txt").read_text()
    assert done[1].stdout == ""
