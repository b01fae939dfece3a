"""A failure of one rank ends or stops all ranks within a known time, and the run can go on
afterwards.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import BOUND_S, TROUBLED, Result, digest, faulty, goes_on, seconds_since, status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "when"),
    [
        ("objective", 1, 12),
        ("objective", 0, 12),
        ("worker", 1, 60),
        ("callback", 1, 7),
        ("predict", 1, 1),
    ],
)
def test_an_exception_on_one_rank_ends_all_and_is_shown_first(
    where: str, rank: int, when: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", f"raise@{where}", rank, when, *TROUBLED, ranks=2)
    assert seconds_since(done) < BOUND_S
    assert {other.returncode for other in done} == {1}
    assert re.match(rf"error on rank {rank}: ZeroDivisionError: .*\nTraceback ", done[0].stderr), (
        done[0].stderr
    )
    assert done[0].stderr.count("error on rank") == 1
    assert done[1].stderr == "", "rank 0 prints what there is to say"
    assert status(tmp_path / "run")["state"] == "failed"
    assert "ZeroDivisionError" in status(tmp_path / "run")["reason"], (
        "not what its end did to the other rank"
    )
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_one_line(
    undisturbed_pair: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", "kill@worker", 1, 60, *TROUBLED, ranks=2)
    assert {rank.returncode for rank in done} == {1}
    line = r"error on rank 1: a loader process died .*; num_workers=0 loads in .*\n"
    assert re.fullmatch(line, done[0].stderr), done[0].stderr
    assert done[1].stderr == ""
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_the_run_goes_on(
    rank: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", "kill@objective", rank, 13, *TROUBLED, ranks=2)
    assert seconds_since(done) < BOUND_S
    assert done[rank].returncode == -9
    assert done[1 - rank].returncode == 1
    assert f"rank {rank} is gone" in done[1 - rank].stderr
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_with_its_place(
    rank: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    done = faulty(tmp_path / "run", "hang@objective", rank, 13, *TROUBLED, ranks=2, timeout=90)
    assert seconds_since(done) < BOUND_S
    text = "".join(other.stderr for other in done)
    assert f"rank {rank} did not come within timeout_s=8 s" in text, text
    assert "tests/faults.py" in text
    assert "pretrain.py" in text
    assert all(other.returncode == 1 for other in done), [other.returncode for other in done]
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "where", "rank", "ended"),
    [
        ("SIGTERM", "objective", 1, 143),
        ("SIGTERM+SIGTERM", "objective", "all", 143),
        ("SIGUSR1", "predict", 1, 138),
        ("SIGUSR1+SIGUSR1", "objective", "all", 138),
        ("SIGTERM", "data", 0, 143),
        ("SIGTERM", "save", 0, 143),
        ("SIGINT", "objective", "all", 130),
    ],
)
def test_asked_to_stop_all_ranks_save_and_end(
    signals: str, where: str, rank: int | str, ended: int, undisturbed_pair: Result, tmp_path: Path
) -> None:
    when = 7 if where == "objective" else 0
    done = faulty(tmp_path / "run", f"{signals}@{where}", rank, when, *TROUBLED, ranks=2)
    assert seconds_since(done) < 20, "torchrun kills after 30 s"
    assert {other.returncode for other in done} == {ended}, [other.stderr for other in done]
    end = status(tmp_path / "run")
    assert end["state"] == ("requeue" if ended == 138 else "stopped")
    assert end["exit_status"] == ended
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(undisturbed_pair: Result, tmp_path: Path) -> None:
    """The first is heard, but its rank does not come to the end of its step."""
    done = faulty(
        tmp_path / "run", "SIGINT+pause+SIGINT+pause@objective", 1, 13, *TROUBLED, ranks=2
    )
    assert seconds_since(done) < 1.6 + 4
    assert {other.returncode for other in done} == {130}
    assert "stopped at once by Ctrl-C" in done[0].stderr + done[1].stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_10\n", (
        "nothing more was saved"
    )
    goes_on(tmp_path / "run", undisturbed_pair)


@pytest.mark.slow
def test_a_suspended_run_goes_on(undisturbed_pair: Result, tmp_path: Path) -> None:
    """For longer than timeout_s nobody waited: all stood still."""
    done = faulty(tmp_path / "run", "suspend@objective", "all", 13, *TROUBLED, ranks=2)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr for rank in done]
    assert digest(tmp_path / "run") == digest(undisturbed_pair.directory)
