"""`compile=auto` on a CPU: long runs in bfloat16 are compiled if that gains anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.steps import steps_of, trainer_on
from utils.measure import compiling
from utils.ranks.distributed import Dist

PLAIN = {"exact": False, "eval_only": False}


@pytest.mark.parametrize(
    ("changed", "dtype", "steps", "operations", "long"),
    [
        ({}, torch.bfloat16, 2_000, 1e11, True),
        ({}, torch.bfloat16, 1_999, 1e15, False),
        ({}, torch.bfloat16, 100_000, 1e8, False),
        ({}, torch.float32, 10**9, 6e9, False),
        ({"exact": True}, torch.bfloat16, 10**9, 6e9, False),
        ({"eval_only": True}, torch.bfloat16, 10**9, 6e9, False),
    ],
)
def test_long_runs_in_bfloat16_may_be_compiled(
    changed: dict[str, bool], dtype: torch.dtype, steps: int, operations: float, long: bool
) -> None:
    config = SimpleNamespace(**{**PLAIN, **changed})
    assert compiling.is_long(config, dtype, steps, lambda: operations) is long


@pytest.mark.slow
def test_a_long_run_is_compiled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, least in (("LEAST_STEPS", 1), ("LEAST_OPERATIONS", 0.0), ("LEAST_GAIN", 0.0)):
        monkeypatch.setattr(compiling, name, least)
    weights = []
    for number, choice in enumerate(("auto", "false")):
        arguments = ["experiment=digits", "arch.forward_dtype=bfloat16", f"compile={choice}"]
        trainer = trainer_on(Dist(), tmp_path / str(number), *arguments)
        if choice == "auto":
            trainer.compile_long_run()
            assert trainer.cfg.compile is True
        for _, step in zip(range(3), steps_of(trainer, 3), strict=True):
            step()
        weights.append([p.detach().clone() for p in trainer.objective.parameters()])
    for compiled, eager in zip(*weights, strict=True):
        torch.testing.assert_close(compiled, eager, atol=2e-2, rtol=0)
