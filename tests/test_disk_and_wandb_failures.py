"""Failures outside a run while it trains: the disk, W&B, the files of its checkpoints."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.runs import (
    QUIET,
    TROUBLED,
    Once,
    Result,
    assert_same_bits,
    digest,
    faulty,
    goes_on,
    status,
)
from tests.utils.rundir.test_status import fill
from utils.checkpoint import reader


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"FAULT_MEMORY": "none"}], ids=["copied", "one by one"])
@pytest.mark.parametrize(
    ("trouble", "says"),
    [("full", "No space left on device"), ("readonly", "Read-only file system")],
)
def test_a_failed_save_is_said_and_training_goes_on(
    trouble: str,
    says: str,
    memory: dict[str, str],
    small_disk: Path,
    undisturbed_pair: Result,
    tmp_path: Path,
) -> None:
    disk = small_disk if trouble == "full" else small_disk / "run" / "checkpoints"
    env = {"FAULT_DISK": str(disk), **memory}
    done = faulty(small_disk / "run", f"{trouble}@save", 0, 1, *TROUBLED, ranks=2, env=env)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    (line,) = [line for line in done[0].stdout.splitlines() if "FAILED" in line]
    assert line.endswith(
        f"checkpoint of step 10 FAILED ({says}); training goes on, the last whole one is step_5"
    )
    assert done[0].stdout.count("checkpoints are written while training waits") == len(memory)
    assert digest(small_disk / "run") == digest(undisturbed_pair.directory)
    steps = [row["step"] for row in Result(small_disk / "run").rows]  # whole lines, each with one
    assert steps == sorted(steps)
    assert steps[-1] == 23, "rows are lost while the disk is full, and no longer"
    assert done[0].stdout.count("metrics.jsonl cannot be written") <= 1


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"FAULT_MEMORY": "none"}], ids=["copied", "one by one"])
def test_a_disk_may_be_slower_than_the_patience_of_ranks(
    memory: dict[str, str], undisturbed_pair: Result, tmp_path: Path
) -> None:
    arguments = [*TROUBLED, "checkpoint_interval=2", "max_steps=4"]
    done = faulty(tmp_path / "run", "stall@save", 0, 0, *arguments, ranks=2, env=memory)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_4\n"


@pytest.mark.slow
def test_hosts_need_no_disk_in_common(small_disk: Path, undisturbed_pair: Result) -> None:
    """Rank 1 does not see what rank 0 has saved."""
    env = {"FAULT_DISK": str(small_disk)}
    for steps in (10, 23):
        arguments = [*TROUBLED, f"max_steps={steps}"]
        done = faulty(small_disk / "run", "another@data", 1, 0, *arguments, ranks=2, env=env)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
        assert "FAULT another" in done[1].stdout
    assert digest(small_disk / "run") == digest(undisturbed_pair.directory)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "readonly"])
def test_three_failed_saves_in_a_row_stop_the_run(
    trouble: str, small_disk: Path, undisturbed_pair: Result, tmp_path: Path
) -> None:
    run = small_disk / "run"
    env = {"FAULT_DISK": str(small_disk if trouble == "full" else run / "checkpoints")}
    done = faulty(
        run, f"{trouble}@save", 0, "1-", *TROUBLED, "checkpoint_interval=2", ranks=2, env=env
    )
    assert [rank.returncode for rank in done] == [1, 1]
    assert "3 saves in a row failed" in done[0].stderr
    assert done[1].stderr == ""
    assert (run / "checkpoints" / "latest").read_text() == "step_2\n"
    if trouble == "full":
        (small_disk / "filler").unlink()
    else:
        subprocess.run(["umount", "--lazy", str(run / "checkpoints")], check=True)
    goes_on(run, undisturbed_pair)
    assert status(run)["state"] == "finished"


@pytest.mark.slow
def test_a_start_on_a_full_disk_is_one_line_about_the_disk(small_disk: Path) -> None:
    fill(small_disk)
    path = small_disk / "new" / "run"
    done = run_ranks(2, ["pretrain.py", *TROUBLED, *QUIET, f"checkpoint_path={path}"])
    assert [rank.returncode for rank in done] == [2, 2]
    said = f"error: checkpoint_path={path}: cannot be written (No space left on device)"
    assert done[0].stderr.startswith(said)
    assert done[0].stderr.count("\n") == 1
    assert done[1].stderr == ""


@pytest.mark.slow
def test_training_goes_on_without_wandb(undisturbed_pair: Result, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = faulty(
        tmp_path / "run", "wandb@objective", 0, 7, *TROUBLED, "wandb.mode=offline", ranks=2
    )
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    # to log, or to start, which goes on beside training
    assert done[0].stdout.count("W&B: could not ") == 1
    assert_same_bits(Result(tmp_path / "run"), undisturbed_pair)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"FAULT_MEMORY": "none"}], ids=["copied", "one by one"])
@pytest.mark.parametrize(
    ("where", "rank", "ranks"),
    [
        ("published", 0, 1),
        ("published", 0, 2),
        ("gather", 1, 2),
        ("published", 0, 3),
        ("gather", 2, 3),
    ],
)
def test_a_rank_is_killed_inside_a_save(
    where: str, rank: int, ranks: int, memory: dict[str, str], once: Once, tmp_path: Path
) -> None:
    """The second checkpoint does not come to be, and the run goes on from the first."""
    run, when = tmp_path / "run", 1
    if where == "gather":  # the fifth tensor of the second save
        first = once(*TROUBLED, "max_steps=6", "keep=null").directory / "checkpoints" / "step_5"
        when = len(load_file(first / "shards.safetensors")) + 5
    done = faulty(run, f"kill-now@{where}", rank, when, *TROUBLED, ranks=ranks, env=memory)
    assert done[rank].returncode == -signal.SIGKILL
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"latest", "step_5"} <= names
    assert "step_10" not in names
    assert reader.newest_whole(run / "checkpoints", pytest.fail) == run / "checkpoints" / "step_5"
    goes_on(run, once(*TROUBLED, ranks=ranks), ranks)
    assert not [*(run / "checkpoints").glob(".*")]
