"""Optimizer states are named by parameter and load without the compiler. For checkpoints see
tests/test_resume.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optim.adam_atan2 import AdamATan2
from optim.optimizer_state import OptimizerState


def test_what_is_remembered_belongs_to_names_and_not_to_places() -> None:
    torch.manual_seed(0)
    one, two = (
        {"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(4))} for _ in range(2)
    )
    keys: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    first = AdamATan2(one.items(), lr=0.1, **keys)
    second = AdamATan2(reversed(two.items()), lr=0.5, **keys)
    for _ in range(3):
        for parameter in one.values():
            parameter.grad = torch.randn(parameter.shape)
        first.step()
    saved = OptimizerState([first]).state()
    assert sorted(saved) == [
        "0/a/exp_avg",
        "0/a/exp_avg_sq",
        "0/b/exp_avg",
        "0/b/exp_avg_sq",
        "0/group0/step",
    ]
    OptimizerState([second]).load(saved)
    again = OptimizerState([second]).state()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert second.param_groups[0]["lr"] == 0.5, "hyper-parameters are the configuration's"
