"""`exact=true`: the same bits at 1, 2, 4 and 8 ranks, shown by the digest of everything in a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_code
from tests.runs import EXACT, NOISY, QUIET, TINY_CNN, TINY_TRM, Result, digest, learned, train

# Logged seldom, so that sums of metrics are in the checkpoint too; clipped, so that the norm of all
# gradients counts.
TRM = [*TINY_TRM, *EXACT, "log_interval=5", "max_steps=23", "grad_clip=0.7"]
CNN = [*TINY_CNN, *EXACT, "max_steps=12"]
GRID = [
    *("arch=grid", "arch.H_cycles=3", "arch.L_cycles=2", "arch.halt_max_steps=4", "optim=muon"),
    *("data.embedded={size:4,blanks:3,train:64,test:37}", "global_batch_size=24", "lr=1e-2"),
    *("epochs=24", "eval_interval=24", "lr_warmup_steps=5", "ema=true", "ema_rate=0.9"),
]
CASES = {
    "trm": TRM,
    "trm-bfloat16": [*TRM, "arch.forward_dtype=bfloat16", "max_steps=9"],
    "trm-noisy": [*TRM, *NOISY],
    "grid": [*GRID, *EXACT, "max_steps=12"],
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


@pytest.fixture(
    scope="module",
    params=[
        "trm",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("trm-bfloat16", "trm-noisy", "grid", "cnn")
        ),
    ],
)
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Result]:
    """One rank, and how it was started."""
    return CASES[request.param], train(
        tmp_path_factory.mktemp(request.param) / "run", *CASES[request.param]
    )


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8))]
)
def test_digests_and_logged_metrics_are_equal(
    alone: tuple[list[str], Result], ranks: int, tmp_path: Path
) -> None:
    arguments, one = alone
    other = train(tmp_path / "run", *arguments, ranks=ranks, timeout=200)
    assert learned(one) == learned(other)
    assert digest(one.directory) == digest(other.directory)


@pytest.mark.slow
def test_float32_without_exact_is_not_bitwise_equal(tmp_path: Path) -> None:
    """Else the tests above show nothing."""
    fast = [*TRM, "exact=false"]
    one, two = train(tmp_path / "one", *fast), train(tmp_path / "two", *fast, ranks=2)
    assert digest(one.directory) != digest(two.directory)


@pytest.mark.slow
def test_exact_computes_the_same_run_as_the_fast_path(
    alone: tuple[list[str], Result], tmp_path: Path
) -> None:
    arguments, one = alone
    fast = train(tmp_path / "run", *arguments, "exact=false")
    rounding = 3e-3 if "arch.forward_dtype=bfloat16" in arguments else 1e-4
    assert fast.series("train/loss")[0] == pytest.approx(one.series("train/loss")[0], rel=rounding)
    assert digest(one.directory) != digest(fast.directory)


@pytest.mark.slow
def test_kernels_are_deterministic_in_exact_runs_alone(tmp_path: Path) -> None:
    done = run_code(ONE_AFTER_THE_OTHER, str(tmp_path), *TINY_TRM, *QUIET, "max_steps=1")
    assert done.returncode == 0, done.stderr
