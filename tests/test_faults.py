"""What goes wrong on one rank ends or stops all of them, within a known time, and the run can go on afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER_PREFIXES, ROOT, Completed, free_port
from tests.runs import FLOAT32, QUIET, TINY_TRM, Result, digest, faulty, learned, train

TRM = [*TINY_TRM, *FLOAT32, "max_steps=23", "log_interval=4", "checkpoint_interval=5", "timeout_s=8"]
BOUND_S = 8 + 5  # timeout_s, and what it takes to say so


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", *TRM, ranks=2)


def goes_on(directory: Path, undisturbed: Result) -> None:
    """The same command, and the run is the undisturbed one."""
    again = train(directory, *TRM, ranks=2)
    assert digest(again.directory) == digest(undisturbed.directory)
    assert learned(again) == learned(undisturbed)


def first_words(done: list[Completed]) -> list[str]:
    """The first line that each rank put on the terminal's error stream."""
    return [next(iter(rank.stderr.strip().splitlines()), "") for rank in done]


@pytest.mark.parametrize(
    ("where", "rank", "when"),
    [
        ("objective", 1, 12),
        pytest.param("objective", 0, 12, marks=pytest.mark.slow),
        pytest.param("worker", 1, 60, marks=pytest.mark.slow),
        pytest.param("callback", 1, 7, marks=pytest.mark.slow),
        pytest.param("predict", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_an_exception_on_one_rank_ends_all_and_is_shown_first(
    where: str, rank: int, when: int, undisturbed: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", f"raise@{where}", rank, when, *TRM, ranks=2)
    assert {other.returncode for other in done} == {1}
    said = first_words(done)
    assert said[rank].startswith(f"error on rank {rank}: ZeroDivisionError: "), said
    assert said[1 - rank] == "", "the other rank has nothing to add"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    goes_on(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_the_run_goes_on(rank: int, undisturbed: Result, tmp_path: Path) -> None:
    started = time.monotonic()
    done = faulty(tmp_path / "run", "kill@objective", rank, 13, *TRM, ranks=2)
    assert time.monotonic() - started < 30 + BOUND_S
    assert done[rank].returncode == -9
    assert done[1 - rank].returncode == 1
    assert f"rank {rank} is gone" in done[1 - rank].stderr
    goes_on(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_with_its_place(rank: int, undisturbed: Result, tmp_path: Path) -> None:
    done = faulty(tmp_path / "run", "hang@objective", rank, 13, *TRM, ranks=2, timeout=90)
    text = "".join(other.stderr for other in done)
    assert f"rank {rank} did not come within timeout_s=8 s" in text, text
    assert "tests/faults.py" in text
    assert "pretrain.py" in text
    assert all(other.returncode == 1 for other in done), [other.returncode for other in done]
    goes_on(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("signals", "where", "rank", "status"),
    [
        ("SIGTERM", "objective", 1, 143),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("SIGTERM+SIGTERM", "objective", "all", 143),
                ("SIGUSR1", "predict", 1, 138),
                ("SIGUSR1+SIGUSR1", "objective", "all", 138),
                ("SIGTERM", "data", 0, 143),
                ("SIGTERM", "save", 0, 143),
                ("SIGINT", "objective", "all", 130),
            )
        ),
    ],
)
def test_asked_to_stop_all_ranks_save_and_end(
    signals: str, where: str, rank: int | str, status: int, undisturbed: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", f"{signals}@{where}", rank, 0 if where in ("data", "save", "predict") else 7, *TRM, ranks=2)
    assert {other.returncode for other in done} == {status}, [other.stderr for other in done]
    told = json.loads((tmp_path / "run" / "status.json").read_text())
    assert told["state"] == ("requeue" if status == 138 else "stopped")
    assert told["exit_status"] == status
    goes_on(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    done = faulty(tmp_path / "run", "nan@objective", 1, 7, *TRM, ranks=2)
    assert {rank.returncode for rank in done} == {1}
    assert "on_nonfinite=raise: step 8" in done[0].stderr
    assert "on rank 1" in done[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_torchrun_restarts_a_run_whose_rank_was_killed(seed: int, undisturbed: Result, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith((*LAUNCHER_PREFIXES, "RANK", "WORLD_SIZE"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += ["--master-port", str(free_port()), "-m", "tests.faults", "kill@objective", str(seed % 2), str(3 + 5 * seed)]
    command += [*QUIET, f"checkpoint_path={tmp_path}/run", *TRM]
    env |= {"OMP_NUM_THREADS": "1", "FAULT_DELAY_S": str(0.007 * seed)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert digest(tmp_path / "run") == digest(undisturbed.directory)
    assert learned(Result(tmp_path / "run")) == learned(undisturbed)
