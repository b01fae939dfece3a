"""Learning rates at the steps that matter."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from contract import RunLength
from optim.schedule import StepDecay, WarmupDecay, build_schedule, set_lr
from utils.errors import ConfigError

COSINE = WarmupDecay(RunLength(110, 1), warmup_steps=10, min_ratio=0.1, decay_share=None)
QUARTER = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
HUNDRED = RunLength(100, 1)
LATE = WarmupDecay(HUNDRED, warmup_steps=10, min_ratio=0.1, decay_share=0.2)
# factors by step
FACTORS: dict[str, tuple[Callable[[int], float], dict[int, float]]] = {
    "warm-up, then a cosine down to the ratio": (
        COSINE,
        {1: 0.1, 9: 0.9, 10: 1.0, 35: QUARTER, 60: 0.1 + 0.9 * 0.5, 110: 0.1},
    ),
    "a rate that stays and then falls": (
        LATE,
        {5: 0.5, 10: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1},
    ),
    "it falls after the warm-up": (
        WarmupDecay(RunLength(100, 1), 90, 0.0, 0.2),
        {90: 1.0, 95: 0.5},
    ),
    "constant by a ratio of 1": (
        WarmupDecay(RunLength(100, 1), 0, 1.0, None),
        dict.fromkeys(range(1, 101), 1.0),
    ),
    "constant without one": (build_schedule(None, RunLength(100, 1)), {1: 1.0, 100: 1.0}),
    "down with the first step of every second epoch": (
        StepDecay(RunLength(100, 1, 10), every_epochs=2, gamma=0.5),
        {1: 1, 20: 1, 21: 0.5, 40: 0.5, 41: 0.25},
    ),
    "a step may straddle two epochs": (
        StepDecay(RunLength(10, 1, 2.5), every_epochs=1, gamma=0.5),
        {1: 1, 2: 1, 3: 1, 4: 0.5, 5: 0.5, 6: 0.25},
    ),
}


@pytest.mark.parametrize("case", FACTORS)
def test_factors_by_step(case: str) -> None:
    schedule, expected = FACTORS[case]
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)


def test_set_lr_scales_the_base_rate_of_every_group() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, "base_lr": lr} for lr in (1.0, 0.5)]
    )
    factors: list[Any] = [0.5, torch.tensor(0.25)]  # always from the base: they do not pile up
    for factor in factors:
        set_lr([optimizer], factor)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.25, 0.125]
    assert {type(rate) for rate in rates} == {float}, "a rate is none, though a factor is a tensor"


def built(length: RunLength = RunLength(12, 1), **config: Any) -> Any:  # noqa: B008
    config["_target_"] = f"optim.schedule.{config.pop('kind', 'WarmupDecay')}"
    return build_schedule(config, length)


def test_a_schedule_of_epochs_needs_epochs() -> None:
    decay = {"kind": "StepDecay", "every_epochs": 1, "gamma": 0.7}
    line = "optim.schedule._target_=optim.schedule.StepDecay: counts epochs, and this data has none"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        built(**decay)
    assert built(RunLength(12, 1, 3), **decay) == StepDecay(RunLength(12, 1, 3), 1, 0.7)


class OfMetric:
    """As those of PyTorch that follow a metric."""

    def __call__(self, step: int, metric: float) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OfMetric, "OfMetric.__call__() missing 1 required positional argument: 'metric'"),
        (object, "'object' object is not callable"),
        (lambda: lambda step: None, "float() argument must be a string or a real number, not 'N"),
    ],
)
def test_what_is_no_schedule_is_one_line(
    kind: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optim.schedule.make", lambda *_, **__: kind())
    with pytest.raises(
        ConfigError, match=rf"_target_=optim.schedule.WarmupDecay: {re.escape(said)}"
    ):
        built()
