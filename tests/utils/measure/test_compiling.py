"""`compile=auto` on a CPU: long runs in bfloat16 are compiled, where the machine can."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contract import Spec
from tests.making import make_objective
from tests.steps import steps_of, trainer_on
from utils.measure import compiling
from utils.ranks.distributed import Dist

PLAIN = {"exact": False, "eval_only": False}


@pytest.mark.parametrize(
    ("changed", "dtype", "steps", "long"),
    [
        ({}, torch.bfloat16, 5_000, True),
        ({}, torch.bfloat16, 4_999, False),
        ({}, torch.float32, 10**9, False),
        ({"exact": True}, torch.bfloat16, 10**9, False),
        ({"eval_only": True}, torch.bfloat16, 10**9, False),
    ],
)
def test_long_runs_in_bfloat16_are_compiled(
    changed: dict[str, bool], dtype: torch.dtype, steps: int, long: bool
) -> None:
    config = SimpleNamespace(**{**PLAIN, **changed})
    assert compiling.is_long(config, dtype, steps) is long


def test_a_machine_that_cannot_compile_goes_on_without() -> None:
    net = make_objective("cnn", Spec(num_classes=10, image_shape=(28, 28))).model

    def without_a_compiler() -> None:
        net.compile(backend=lambda graph, inputs: 1 / 0)

    said: list[str] = []
    one_pass = partial(net, torch.ones(1, 28, 28))
    assert not compiling.compile_if_possible(Dist(), one_pass, without_a_compiler, said.append)
    assert "division by zero" in said[-1]
    assert one_pass().shape == (1, 10)


@pytest.mark.slow
def test_a_long_run_is_compiled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "LONG", 1)
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
