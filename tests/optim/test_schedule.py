"""Learning rates at the steps that matter."""

import math
import re

import pytest
import torch
from torch import nn

from optim.schedule import Constant, StepDecay, WarmupDecay, build_schedule, set_lr
from utils.errors import ConfigError


def test_warm_up_then_cosine_down_to_the_ratio():
    schedule = WarmupDecay(total_steps=110, warmup_steps=10, min_ratio=0.1, decay_share=None)
    assert schedule(1) == pytest.approx(0.1)
    assert schedule(9) == pytest.approx(0.9)
    assert schedule(10) == pytest.approx(1.0)
    assert schedule(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule(110) == pytest.approx(0.1)


def test_ratio_one_and_no_warm_up_is_constant():
    assert {WarmupDecay(100, 0, 1.0, None)(step) for step in range(1, 101)} == {1.0}
    assert {Constant()(step) for step in range(1, 101)} == {1.0}


def test_step_decay_starts_with_the_first_step_of_an_epoch():
    schedule = StepDecay(steps_per_epoch=10, every_epochs=2, gamma=0.5)
    assert [schedule(step) for step in (1, 20, 21, 40, 41)] == [1, 1, 0.5, 0.5, 0.25]
    straddling = StepDecay(steps_per_epoch=2.5, every_epochs=1, gamma=0.5)
    assert [straddling(step) for step in (1, 2, 3, 4, 5, 6)] == [1, 1, 1, 0.5, 0.5, 0.25]


def test_set_lr_scales_the_base_rate_of_every_group():
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, "base_lr": lr} for lr in (1.0, 0.5)]
    )
    for factor in (0.5, 0.25):  # always from the base: factors do not pile up
        set_lr([optimizer], factor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_a_schedule_of_epochs_needs_epochs():
    decay = {"_target_": "optim.schedule.StepDecay", "every_epochs": 1, "gamma": 0.7}
    with pytest.raises(
        ConfigError,
        match=(
            r"^optim\.schedule\._target_=optim\.schedule\.StepDecay: counts epochs, and this data"
            r" has none"
        ),
    ):
        build_schedule(decay, total_steps=12, steps_per_epoch=None)
    assert (
        build_schedule(
            {"_target_": "optim.schedule.Constant"}, total_steps=12, steps_per_epoch=None
        )
        == Constant()
    )
    assert build_schedule(
        decay | {"steps_per_epoch": 3}, total_steps=12, steps_per_epoch=None
    ) == StepDecay(3, 1, 0.7)


class OfMetric:
    """As those of PyTorch that follow a metric."""

    def __call__(self, step: int, metric: float) -> float:
        return 1.0


def test_what_is_no_schedule_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_target_": "optim.schedule.Constant"}
    for kind, said in [
        (OfMetric, "OfMetric.__call__() missing 1 required positional argument: 'metric'"),
        (object, "'object' object is not callable"),
        (lambda: lambda step: None, "float() argument must be a string or a real number, not 'N"),
    ]:
        monkeypatch.setattr("optim.schedule.make", lambda *_, kind=kind, **__: kind())
        with pytest.raises(
            ConfigError, match=rf"_target_=optim.schedule.Constant: {re.escape(said)}"
        ):
            build_schedule(config, total_steps=12, steps_per_epoch=None)


def test_a_factor_that_is_a_tensor_gives_a_rate_that_is_none() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0]["base_lr"] = 1.0
    set_lr([optimizer], torch.tensor(0.5))  # type: ignore[arg-type]
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_rate_that_stays_and_then_falls() -> None:
    schedule = WarmupDecay(total_steps=100, warmup_steps=10, min_ratio=0.1, decay_share=0.2)
    assert [schedule(step) for step in (5, 10, 50, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert [schedule(step) for step in (90, 100)] == pytest.approx([0.55, 0.1])
    late = WarmupDecay(100, 90, 0.0, 0.2)
    assert [late(step) for step in (90, 95)] == [1.0, 0.5], "it falls after the warm-up"
