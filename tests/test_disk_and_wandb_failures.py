"""Failures outside a run while it trains: the disk, W&B, the files of its checkpoints."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runs import QUIET, TROUBLED, Result, assert_same_bits, digest, faulty, goes_on, status
from tests.utils.rundir.test_status import fill
from utils.checkpoint import reader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "says"),
    [("full", "No space left on device"), ("readonly", "Read-only file system")],
)
def test_a_failed_save_is_said_and_training_goes_on(
    trouble: str, says: str, small_disk: Path, undisturbed_pair: Result, tmp_path: Path
) -> None:
    disk = small_disk if trouble == "full" else small_disk / "run" / "checkpoints"
    env = {"FAULT_DISK": str(disk)}
    done = faulty(small_disk / "run", f"{trouble}@save", 0, 1, *TROUBLED, ranks=2, env=env)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    lines = [line for line in done[0].stdout.splitlines() if "FAILED" in line]
    assert len(lines) in (1, 2), (
        "rank 0 mends it at the next save, for which rank 1 may have come too early"
    )
    assert "checkpoint of step 10 FAILED on rank" in lines[0]
    assert lines[0].endswith(f"{says}; training goes on, the last whole one is step_5")
    assert digest(small_disk / "run") == digest(undisturbed_pair.directory)
    steps = [row["step"] for row in Result(small_disk / "run").rows]  # whole lines, each with one
    assert steps == sorted(steps)
    assert steps[-1] == 23, "rows are lost while the disk is full, and no longer"
    assert done[0].stdout.count("metrics.jsonl cannot be written") <= 1


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
@pytest.mark.parametrize(("where", "rank"), [("reported", 1), ("published", 0)])
def test_a_rank_is_killed_between_its_files_and_the_rename(
    where: str, rank: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    """The second checkpoint does not come to be, and the run goes on from the first."""
    run = tmp_path / "run"
    done = faulty(run, f"kill-now@{where}", rank, 1, *TROUBLED, ranks=2)
    assert done[rank].returncode == -signal.SIGKILL
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"latest", "step_5"} <= names
    assert "step_10" not in names
    if rank == 0:  # which clears up after rank 1
        assert any(name.startswith(".step_10.writing") for name in names)
    assert reader.newest_whole(run / "checkpoints", pytest.fail) == run / "checkpoints" / "step_5"
    goes_on(run, undisturbed_pair)
    assert not [*(run / "checkpoints").glob(".*")]


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2, 4])
def test_what_one_host_alone_reads_otherwise_is_damaged_for_all(
    file: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    """Rank 1 stands for that host; its first file is meta.json."""
    run = shutil.copytree(undisturbed_pair.directory, tmp_path / "run")
    done = faulty(run, "flip@read", 1, file, *TROUBLED, "max_steps=24", ranks=2)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    assert "checkpoint step_23 is damaged (" in done[0].stdout
    assert ": sha256 differs on rank 1); going back to step_20" in done[0].stdout
    assert (run / "checkpoints" / "latest").read_text() == "step_24\n"
