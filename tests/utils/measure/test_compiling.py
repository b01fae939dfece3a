"""`compile=auto` on a CPU: long runs in bfloat16 are compiled if that gains anything."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.steps import steps_of, trainer_on
from utils.measure import compiling
from utils.ranks.distributed import Dist

PLAIN = {"exact": False, "eval_only": False}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Returns the stances that are set, and sets none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    return stances


def test_compiled_code_is_kept_where_the_user_or_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.keep_compiled_code()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path / "lockstep"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    compiling.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


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


def tried(monkeypatch: pytest.MonkeyPatch, compiled_s: float | None) -> tuple[bool, list[str]]:
    """Returns the answer and what is said if a pass takes 1 s, and this long when compiled."""
    now, pass_s, said = [0.0], [1.0], list[str]()
    monkeypatch.setattr(compiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def one_pass() -> None:
        if pass_s[-1] is None:
            raise RuntimeError("no compiler\nfound Set TORCHDYNAMO_VERBOSE=1 for more")
        now[0] += pass_s[-1]

    def compile_net() -> None:
        pass_s.append(compiled_s)  # type: ignore[arg-type]

    return compiling.compile_if_faster(Dist(), one_pass, compile_net, said.append), said


def test_what_is_faster_stays(as_before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gained, said = tried(monkeypatch, 0.9)
    assert gained
    assert said[-1] == (
        "compiled in 1 s: a pass takes 1000.0 ms eagerly, 900.0 ms compiled; results differ by"
        " rounding"
    )
    assert as_before == ["default"]


def test_what_is_hardly_faster_is_not_used(
    as_before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gained, said = tried(monkeypatch, 0.95)
    assert not gained
    assert said[-1].startswith("not compiled: a pass takes 1000.0 ms eagerly, 950.0 ms compiled;")
    assert as_before == ["default", "force_eager"]


def test_a_compiler_that_fails_is_one_line(
    as_before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gained, said = tried(monkeypatch, None)
    assert not gained
    assert said[-1] == "not compiled: no compiler found; the run goes on without"
    assert as_before[-1] == "force_eager"


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
