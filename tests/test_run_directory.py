"""Ownership of a run directory: starting beside a live run, evaluating it, and losing the
directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pretrain
from tests.ranks import run_ranks
from tests.runs import Result, config_of, digest, status
from utils.errors import RunError
from utils.measure import hardware
from utils.rundir.directory import RunDirectory
from utils.rundir.folders import Lock

SMALL = [
    "arch=cnn",
    "data=digits",
    "optim=adamw",
    "global_batch_size=16",
    "epochs=1",
    "eval_interval=1",
    "max_steps=3",
    "num_workers=0",
    "log_interval=1",
    "eval_batch_size=180",
    "wandb.mode=disabled",
    "project_name=p",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the runs of this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "tune", lambda exact: None)
    return tmp_path / "runs" / "p"


def do(*arguments: str) -> None:
    pretrain.pretrain(config_of(*SMALL, *arguments))


@contextmanager
def held(run: Path) -> Iterator[None]:
    lock = Lock(run)
    assert lock.acquire()
    try:
        yield
    finally:
        lock.release()


def test_a_start_beside_a_live_run_is_refused_before_it_reads_anything(tmp_path: Path) -> None:
    damaged = tmp_path / "x" / "checkpoints" / "step_5"
    damaged.mkdir(parents=True)  # a reader would have something to say about it
    with held(tmp_path / "x"):
        done = run_ranks(
            2,
            [
                "pretrain.py",
                *SMALL,
                f"data_path={tmp_path}",  # holds no dataset
                f"checkpoint_path={tmp_path}/x",
                "timeout_s=30",
            ],
        )
    assert [rank.returncode for rank in done] == [2, 2]
    said = f"checkpoint_path={tmp_path}/x: another run (which has just begun) writes there"
    assert said in done[0].stderr
    assert sum(rank.stderr.count("\n") for rank in done) == 1
    assert done[0].stdout == ""
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == ["checkpoints"]


@pytest.mark.slow
def test_an_evaluation_leaves_the_training_alone(folder: Path) -> None:
    do("run_name=x")
    before = digest(folder / "x")
    with held(folder / "x"):  # as while it is being trained
        for _ in range(2):
            do("run_name=x", "eval_only=true", "checkpoint=runs/p/x")
    assert sorted(os.listdir(folder)) == ["x", "x-evaluation", "x-evaluation-2"]
    assert all(
        len(Result(folder / f"x-evaluation{number}").series("eval/accuracy")) == 1
        for number in ("", "-2")
    )
    assert digest(folder / "x") == before
    assert status(folder / "x")["state"] == status(folder / "x-evaluation")["state"] == "finished"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("take", [shutil.rmtree])
def test_a_directory_that_goes_away_ends_the_run(
    step: int, take: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-run and after the last step, before what it made is saved."""
    log = RunDirectory.log

    def log_and_lose(run: RunDirectory, at: int, metrics: dict) -> None:
        log(run, at, metrics)
        if at == step and run.directory.exists():
            take(run.directory)

    monkeypatch.setattr(RunDirectory, "log", log_and_lose)
    with pytest.raises(
        RunError,
        match=(
            r"^checkpoint_path=runs/p/x: deleted or moved while the run was going on; put back, it"
            r" goes on"
        ),
    ):
        do("run_name=x", "eval_save_outputs=[answer]")
    assert not (folder / "x").exists(), "nothing is made again"
