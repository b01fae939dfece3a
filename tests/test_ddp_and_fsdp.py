"""sync=ddp and sync=fsdp: their checkpoints and faults; test_same_run.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.runs import (
    BOUND_S,
    TINY_GPT,
    TINY_TRM,
    Once,
    assert_same_run,
    faulty,
    seconds_since,
    status,
    stopped,
    train,
)

TRM = [*TINY_TRM, "grad_clip=1.0", "max_steps=30"]
slow = pytest.mark.slow


@slow
def test_muon_gathers_its_matrices(tmp_path: Path) -> None:
    """Ranks hold rows of each matrix, and go on with those of a checkpoint."""
    line = [*TINY_GPT, "optim=muon"]
    whole = train(tmp_path / "whole", *line)
    stopped(tmp_path / "split", *line, "sync=fsdp", ranks=3)
    assert_same_run(whole, train(tmp_path / "split", *line, "sync=fsdp", ranks=2))


@slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", 2), ("allreduce", 1)),
        (("allreduce", 2), ("fsdp", 4)),
        (("fsdp", 3), ("fsdp", 2)),
        (("allreduce", 2), ("allreduce", 3)),
    ],
)
def test_a_stopped_run_goes_on_in_another_way(
    before: tuple[str, int], after: tuple[str, int], once: Once, tmp_path: Path
) -> None:
    """One format of checkpoints; what optimizers remember and averages are in it."""
    trm = once(*TRM)
    stopped(tmp_path / "run", *TRM, f"sync={before[0]}", ranks=before[1])
    again = train(tmp_path / "run", *TRM, f"sync={after[0]}", ranks=after[1])
    assert "continued at step 10" in (again.directory / "log.txt").read_text()
    assert_same_run(trm, again)
    assert_close(again.weights("optimizer"), trm.weights("optimizer"), rtol=0, atol=1e-6)


@slow
@pytest.mark.parametrize("sync", ["ddp", "fsdp"])
def test_a_rank_that_hangs_ends_the_run(sync: str, tmp_path: Path) -> None:
    """The others wait for it inside of PyTorch."""
    done = faulty(
        tmp_path / "run", "hang@objective", 1, 13, *TRM, f"sync={sync}", "timeout_s=8", ranks=2
    )
    assert seconds_since(done) < 2 * BOUND_S
    assert all(rank.returncode for rank in done)
    assert status(tmp_path / "run")["state"] == "failed"


@slow
@pytest.mark.parametrize("sync", ["allreduce", "ddp", "fsdp"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_that_is_not_finite_is_refused_on_all_ranks(
    sync: str, policy: str, tmp_path: Path
) -> None:
    arguments = [*TINY_TRM, "max_steps=6", f"on_nonfinite={policy}", f"sync={sync}"]
    done = faulty(tmp_path / "run", "nan@objective", 1, 3, *arguments, ranks=2)
    text = done[0].stdout + done[0].stderr
    assert "the gradient is not finite, first seen in model.inner" in text
    assert {rank.returncode for rank in done} == ({1} if policy == "raise" else {0}), text
