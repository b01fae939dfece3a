"""A live run owns its directory: a second start is refused, an evaluation has one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import check_ended_well, run_line, run_ranks
from tests.runs import QUIET, TINY_CNN, Result, digest, status
from utils.rundir.folders import Lock

SMALL = [*TINY_CNN, *QUIET, "max_steps=3", "num_workers=0", "project_name=p"]


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
        paths = f"data_path={tmp_path}", f"checkpoint_path={tmp_path}/x"  # there is no dataset
        done = run_ranks(2, ["pretrain.py", *SMALL, *paths])
    assert [rank.returncode for rank in done] == [2, 2]
    said = f"checkpoint_path={tmp_path}/x: another run (which has just begun) writes there"
    assert said in done[0].stderr
    assert sum(rank.stderr.count("\n") for rank in done) == 1
    assert done[0].stdout == ""
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == ["checkpoints"]


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
