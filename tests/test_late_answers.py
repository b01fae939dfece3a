"""A device that is a step behind its host, as CUDA is: what is not finite is heard of one step
late, and nothing comes of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.runs import (
    INTERRUPTED,
    QUIET,
    STOPPED,
    TROUBLED,
    Result,
    digest,
    faulty,
    goes_on,
    learned,
)

LATE = {"FAULT_LATE": "1"}
ARGUMENTS = [
    *INTERRUPTED,
    *QUIET,
    *("log_interval=4", "checkpoint_interval=5", "eval_every_steps=7", "max_steps=11"),
    "num_workers=0",
    "keep=null",
]


def ended(run: Path, late: bool, bad: str, *arguments: str) -> str:
    """How a run ends whose gradients are not finite in some steps, counted from 0."""
    env = LATE if late else {}
    (done,) = faulty(run, "nan@objective", 0, bad, *ARGUMENTS, *arguments, env=env)
    assert "Traceback" not in done.stderr
    return done.stderr


# 6: in the way of nothing; the others just before a checkpoint is written, a row logged, an
# evaluation made, and the run over
@pytest.mark.parametrize(
    "step", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 8, 10, 11))]
)
def test_nothing_comes_of_a_step_that_is_not_finite(step: int, tmp_path: Path) -> None:
    at_once, late = Result(tmp_path / "at once"), Result(tmp_path / "late")
    said = ended(at_once.directory, False, str(step - 1))
    line = rf"error: on_nonfinite=raise: step {step}: .* not finite, first seen in model\.\S+;"
    assert re.match(line, said), said
    assert ended(late.directory, True, str(step - 1)) == said
    assert learned(late) == learned(at_once)
    assert all(row["step"] < step for row in late.rows)
    saved, saved_late = (
        {int(path.name[5:]) for path in (run.directory / "checkpoints").glob("step_*")}
        for run in (at_once, late)
    )
    assert saved_late == saved
    assert max(saved_late) < step
    assert digest(late.directory) == digest(at_once.directory)


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_all_as_it_was(tmp_path: Path) -> None:
    """On a device that is behind, too: there the host waits for the verdict."""
    skipping = ["on_nonfinite=skip", "checkpoint_interval=1", "eval_every_steps=null"]
    for name in ("at once", "late"):
        assert ended(tmp_path / name, name == "late", "5-6", *skipping) == ""
    assert digest(tmp_path / "late") == digest(tmp_path / "at once")
    folders = [tmp_path / "late" / "checkpoints" / f"step_{step}" for step in (5, 7, 8)]
    before, after, on = (
        {name: load_file(folder / f"{name}.safetensors") for name in ("model", "ema", "optimizer")}
        for folder in folders
    )
    assert_close(after, before, rtol=0, atol=0)
    for group, tensors in before.items():
        assert any(not torch.equal(tensor, on[group][name]) for name, tensor in tensors.items()), (
            group
        )


@pytest.mark.slow
def test_two_ranks_that_hear_late_are_the_same_run(
    undisturbed_pair: Result, tmp_path: Path
) -> None:
    """Asked to stop, they save a step later, and the end is the same."""
    done = faulty(tmp_path / "run", "SIGTERM@objective", 1, 5, *TROUBLED, ranks=2, env=LATE)
    assert {rank.returncode for rank in done} == {STOPPED}, done[0].stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_7\n"
    goes_on(tmp_path / "run", undisturbed_pair)
