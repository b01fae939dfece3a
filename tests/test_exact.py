"""`exact=true`: the same bits at 1, 2, 4 and 8 ranks, shown by the digest of everything in a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_code, words
from tests.runs import (
    EXACT,
    NOISY,
    QUIET,
    TINY_CANDIDATES,
    TINY_CNN,
    TINY_SYMBOLS,
    TINY_TRM,
    Once,
    assert_same_bits,
    digest,
    train,
)

slow = pytest.mark.slow
# Logged seldom, so that sums of metrics are in the checkpoint too; clipped, so that the norm of all
# gradients counts.
TRM = [*TINY_TRM, *EXACT, "log_interval=5", "max_steps=13", "grad_clip=0.7"]
CNN = [*TINY_CNN, *EXACT, "max_steps=12"]
GRID = words("""
    arch=grid arch.H_cycles=3 arch.L_cycles=2 arch.halt_max_steps=4 optim=muon
    data.embedded={size:4,blanks:3,train:64,test:37} global_batch_size=24 lr=1e-2 epochs=24
    eval_interval=24 lr_warmup_steps=5 ema=true ema_rate=0.9
""")
CASES = {
    "trm": TRM,
    "trm-bfloat16": [*TRM, "arch.forward_dtype=bfloat16", "max_steps=9"],
    "trm-noisy": [*TRM, *NOISY],
    "grid": [*GRID, *EXACT, "max_steps=12"],
    "grid-no-values": [*GRID, *EXACT, "arch.value_iteration=false", "max_steps=12"],
    "symbols": [*TINY_SYMBOLS, *EXACT, "max_steps=12"],
    "candidates": [*TINY_CANDIDATES, *EXACT, "max_steps=12"],
    "cnn": CNN,
}

ONE_AFTER_THE_OTHER = """
import sys, torch, pretrain
from tests.runs import config_of
folder, *arguments = sys.argv[1:]
for exact in (True, False):
    pretrain.pretrain(config_of(*arguments, f"exact={exact}", f"checkpoint_path={folder}/{exact}"))
    assert torch.are_deterministic_algorithms_enabled() is exact
"""


SLOW = [pytest.param(case, marks=slow) for case in CASES if case != "trm"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow), pytest.param(8, marks=slow)])
@pytest.mark.parametrize("case", ["trm", *SLOW])
def test_digests_and_logged_metrics_are_equal(
    case: str, ranks: int, once: Once, tmp_path: Path
) -> None:
    other = train(tmp_path / "run", *CASES[case], ranks=ranks, timeout=200)
    assert_same_bits(once(*CASES[case]), other)


@slow
def test_float32_without_exact_is_not_bitwise_equal(tmp_path: Path) -> None:
    """Else the tests above show nothing."""
    fast = [*TRM, "exact=false"]
    one, two = train(tmp_path / "one", *fast), train(tmp_path / "two", *fast, ranks=2)
    assert digest(one.directory) != digest(two.directory)


@slow
@pytest.mark.parametrize("case", CASES)
def test_exact_computes_the_same_run_as_the_fast_path(
    case: str, once: Once, tmp_path: Path
) -> None:
    one, fast = once(*CASES[case]), train(tmp_path / "run", *CASES[case], "exact=false")
    rounding = 3e-3 if "bfloat16" in case else 1e-4
    assert fast.series("train/loss")[0] == pytest.approx(one.series("train/loss")[0], rel=rounding)
    assert digest(one.directory) != digest(fast.directory)


@slow
def test_kernels_are_deterministic_in_exact_runs_alone(tmp_path: Path) -> None:
    done = run_code(ONE_AFTER_THE_OTHER, str(tmp_path), *TINY_TRM, *QUIET, "max_steps=1")
    assert done.returncode == 0, done.stderr
