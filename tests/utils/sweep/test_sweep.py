"""`python pretrain.py -m`: jobs as processes, one failing, some at once, stopped and continued."""

import csv
import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import ROOT, assert_one_line, clean_env, run_line, started, until, words
from tests.runs import FLOAT32, STOPPED, TINY_TRM, digest, status, train
from utils.sweep.children import shares

KEYS = "wandb.mode=disabled report=false global_batch_size=16 epochs=null eval_interval=null"
SHORT = [*TINY_TRM, *FLOAT32, *words(f"{KEYS} eval_every_steps=4 run_name=me")]
LONG = ["max_steps=900", "eval_every_steps=300", "checkpoint_interval=50"]
slow = pytest.mark.slow


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """As a user starts it."""
    command = [sys.executable, str(ROOT / "pretrain.py"), "-m", *SHORT, *arguments]
    return started(command, folder, clean_env(**variables))


def sweep(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Returns its exit status, and what it said."""
    process = start(folder, *arguments, **variables)
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def table(folder: Path) -> list[dict[str, str]]:
    """The table of the only sweep there."""
    (file,) = folder.glob("runs/multirun/*/jobs.csv")
    return list(csv.DictReader(file.open()))


def run_of(folder: Path, seed: int) -> Path:
    """The directory of a job; its name has all overrides."""
    rows = [row for row in table(folder) if f"seed={seed}" in row["overrides"].split()]
    return folder / rows[0]["directory"]


def begun(folder: Path, runs: int) -> bool:
    """True once this number of runs have saved a checkpoint."""
    return until(
        lambda: len([*folder.glob("runs/puzzles/*/checkpoints/latest")]) >= runs, within=60
    )


@slow
def test_a_failing_job_does_not_end_a_sweep(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "seed=0,x,1", "sweep.jobs=2", "max_steps=8")
    assert code != 0
    assert "error: job 2: seed=x" in err
    assert "job 2 ended with exit status 2" in err
    assert "\n1: step 8, held out: " in out
    assert "\n3: step 8, held out: " in out
    rows = table(tmp_path)
    ends = [("finished", "8"), ("failed", ""), ("finished", "8")]
    assert [(row["state"], row["steps"]) for row in rows] == ends
    assert rows[0]["metric"] == "eval/exact_accuracy"
    assert rows[0]["value"]
    assert len({row["directory"] for row in rows}) == 3
    # repeated, it resumes what is there
    _, out, _ = sweep(tmp_path, "seed=0,x,1", "sweep.jobs=2", "max_steps=8")
    assert out.count("is finished") == 2


@pytest.mark.parametrize(
    ("arguments", "ranks", "line"),
    [
        (["-m", "sweep.jobs=0", "seed=0,1"], 1, "sweep.jobs=0"),
        (["-m", "seed=0,1"], 2, "sweep.ranks=2"),
        (["-m", "seed=x,y"], 1, "seed=x"),
    ],
)
def test_what_a_sweep_cannot_be(
    arguments: list[str], ranks: int, line: str, tmp_path: Path
) -> None:
    assert_one_line(run_line(arguments, tmp_path, ranks), line)


@slow
def test_a_sweep_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Both jobs save at a signal to the sweep, and resume when it is repeated."""
    arguments = ["seed=0,1", "sweep.jobs=2", *LONG]
    file = tmp_path / "status"
    process = start(tmp_path, *arguments, LOCKSTEP_STATUS=str(file))
    assert begun(tmp_path, 2)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert "the same command goes on" in err
    assert {status(run_of(tmp_path, seed))["state"] for seed in (0, 1)} == {"requeue"}
    assert json.loads(file.read_text())["state"] == "requeue"
    code, _, err = sweep(tmp_path, *arguments, LOCKSTEP_STATUS=str(file))
    assert code == 0, err
    assert json.loads(file.read_text())["state"] == "finished"
    for seed in (0, 1):
        assert "continued at step" in (run_of(tmp_path, seed) / "log.txt").read_text()
        whole = train(tmp_path / f"alone{seed}", *SHORT, *LONG, f"seed={seed}")
        assert digest(run_of(tmp_path, seed)) == digest(whole.directory)


@slow
def test_jobs_of_two_ranks_are_the_runs_of_one(tmp_path: Path) -> None:
    exact = ["max_steps=8", "exact=true"]
    code, _, err = sweep(tmp_path, "seed=0,1", "sweep.ranks=2", *exact)
    assert code == 0, err
    alone = train(tmp_path / "alone", *SHORT, *exact, "seed=1")
    assert digest(run_of(tmp_path, 1)) == digest(alone.directory)


@slow
def test_a_task_of_a_job_array_runs_one_job_of_the_whole_table(tmp_path: Path) -> None:
    for task in (2, 1):
        code, _, err = sweep(tmp_path, "seed=0,1", f"sweep.only={task}", "max_steps=4")
        assert code == 0, err
        states = [row["state"] for row in table(tmp_path)]
        assert states == (["waiting", "finished"] if task == 2 else ["finished"] * 2)


@slow
@pytest.mark.skipif(not find_spec("hydra_plugins.hydra_optuna_sweeper"), reason="no plugin")
def test_a_study_that_was_stopped_repeats_no_trial(tmp_path: Path) -> None:
    arguments = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "beta1=interval(0.5,0.9)"]
    arguments += ["max_steps=400", "eval_every_steps=200", "checkpoint_interval=50"]
    process = start(tmp_path, *arguments)
    assert begun(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == STOPPED
    code, _, err = sweep(tmp_path, *arguments)
    assert code == 0, err
    runs = [*tmp_path.glob("runs/puzzles/*")]
    assert len(runs) == 4
    assert {status(run)["state"] for run in runs} == {"finished"}
    code, _, err = sweep(tmp_path, *arguments)
    assert code == 0, err
    assert len([*tmp_path.glob("runs/puzzles/*")]) == 4, "the study is complete"


@slow
@pytest.mark.skipif(not find_spec("hydra_plugins.hydra_submitit_launcher"), reason="no plugin")
def test_submitit_runs_jobs_too(tmp_path: Path) -> None:
    submitit = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2"]
    code, _, err = sweep(tmp_path, "seed=0,1", *submitit, "max_steps=4", PYTHONPATH=str(ROOT))
    assert code == 0, err
    runs = [*tmp_path.glob("runs/puzzles/*")]
    assert [status(run)["state"] for run in runs] == ["finished"] * 2


def test_jobs_share_gpus_and_cores() -> None:
    assert shares(1, 1, {}, [], 8) == [{}]
    assert shares(2, 2, {}, ["0", "1", "2", "3"], 8) == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert shares(2, 1, {"OMP_NUM_THREADS": "1"}, ["a"], 8) == [{"CUDA_VISIBLE_DEVICES": "a"}] * 2
