"""A device that is a step behind its host, as CUDA is: what is not finite is heard of one step
late, and nothing comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pretrain
from models.recursive.act import ActObjective
from optim import agreement
from tests.runs import (
    INTERRUPTED,
    QUIET,
    STOPPED,
    TROUBLED,
    Result,
    config_of,
    digest,
    faulty,
    goes_on,
    learned,
)
from utils.errors import RunError

LATE = {"FAULT_LATE": "1"}
PLANS = {"log_interval": 4, "checkpoint_interval": 5, "eval_every_steps": 7, "max_steps": 11}
ARGUMENTS = [
    *INTERRUPTED,
    *QUIET,
    *(f"{key}={value}" for key, value in PLANS.items()),
    "num_workers=0",
    "keep=null",
]
Train = Callable[..., tuple[Result, str]]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Train]:
    """A run on one rank in this process, whose gradients are not finite from a step on, if one is
    given; and how it ended.
    """
    monkeypatch.setattr("utils.measure.hardware.tune", lambda exact: None)
    forward, threads = ActObjective.forward, torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have

    def train(name: str, lag: int, bad: range = range(0), *arguments: str) -> tuple[Result, str]:
        steps = iter(range(1, 10**9))

        def faulty_forward(self: ActObjective, *given: Any) -> Any:
            out = forward(self, *given)
            if next(steps) in bad:
                out.loss.register_hook(lambda grad: grad * float("nan"))
            return out

        monkeypatch.setitem(agreement.LAG, "cpu", lag)
        monkeypatch.setattr(ActObjective, "forward", faulty_forward)
        ended = ""
        try:
            pretrain.pretrain(
                config_of(*ARGUMENTS, *arguments, f"checkpoint_path={tmp_path / name}")
            )
        except RunError as error:
            ended = str(error)
        return Result(tmp_path / name), ended

    yield train
    torch.set_num_threads(threads)


# 6: in the way of nothing; the others just before a checkpoint is written, a row logged, an
# evaluation made, and the run over
@pytest.mark.parametrize(
    "step", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 8, 10, 11))]
)
def test_nothing_comes_of_a_step_that_is_not_finite(step: int, alone: Train) -> None:
    at_once, said = alone("at once", 0, range(step, step + 1))
    late, said_late = alone("late", 1, range(step, step + 1))
    assert re.match(
        rf"on_nonfinite=raise: step {step}: the gradient is not finite, first seen in model\.\S+"
        r";",
        said,
    )
    assert said_late == said
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
def test_a_step_that_is_skipped_leaves_all_as_it_was(alone: Train) -> None:
    """On a device that is behind, too: there the host waits for the verdict."""
    skipping = ["on_nonfinite=skip", "checkpoint_interval=1", "eval_every_steps=null"]
    result, said = alone("late", 1, range(6, 8), *skipping)
    assert said == ""
    assert digest(result.directory) == digest(
        alone("at once", 0, range(6, 8), *skipping)[0].directory
    )
    folders = [result.directory / "checkpoints" / f"step_{step}" for step in (5, 7, 8)]
    before, after, on = (
        {name: load_file(folder / f"{name}.safetensors") for name in ("model", "ema", "optimizer")}
        for folder in folders
    )
    for group, tensors in before.items():
        assert all(torch.equal(tensor, after[group][name]) for name, tensor in tensors.items()), (
            group
        )
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
