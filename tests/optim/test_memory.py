"""Optimizer states are named by parameter and load without the compiler. For checkpoints see
test_registry.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from optim.adam_atan2 import AdamATan2
from optim.builtin import adamw, muon
from optim.memory import Memory
from tests.ranks import ROOT


def test_what_is_remembered_belongs_to_names_and_not_to_places() -> None:
    torch.manual_seed(0)
    one, two = (
        {"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(4))} for _ in range(2)
    )
    first, second = AdamATan2(one.items(), lr=0.1), AdamATan2(reversed(two.items()), lr=0.5)
    for _ in range(3):
        for parameter in one.values():
            parameter.grad = torch.randn(parameter.shape)
        first.step()
    saved = Memory([first]).state()
    assert sorted(saved) == [
        "0/a/exp_avg",
        "0/a/exp_avg_sq",
        "0/b/exp_avg",
        "0/b/exp_avg_sq",
        "0/group0/step",
    ]
    Memory([second]).load(saved)
    again = Memory([second]).state()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert second.param_groups[0]["lr"] == 0.5, "hyper-parameters are the configuration's"


@pytest.mark.parametrize("optimizer", [AdamATan2, adamw, muon])
def test_only_what_has_not_begun_may_have_nothing_to_remember(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    memory = Memory([optimizer([("a", nn.Parameter(torch.ones(2, 3)))], lr=0.1)])
    fresh = memory.state()
    assert memory.like(fresh, 0).keys() == fresh.keys()
    full = memory.like(fresh, 1)
    assert full.keys() > fresh.keys()
    assert memory.like(full, 0).keys() == full.keys()
    assert full["0/a/momentum_buffer" if optimizer is muon else "0/a/exp_avg"].shape == (2, 3)


def test_a_run_that_begins_or_goes_on_does_not_load_the_compiler() -> None:
    """Several seconds of a start, for nothing."""
    code = (
        "import sys, torch, optim.groups; from torch import nn; from optim.memory import"
        " Memory\nfrom optim.adam_atan2 import AdamATan2; from optim.builtin import adadelta,"
        " adamw, muon, sgd\np = nn.Parameter(torch.ones(2, 3))\nfor kind in (AdamATan2, adadelta,"
        " adamw, muon, sgd):\n    optimizer = kind([('a', p)], lr=0.1)\n    memory ="
        " Memory([optimizer])\n    memory.load({name: torch.zeros(tensor.shape, dtype=tensor.dtype)"
        " for name, tensor in memory.like({}, 1).items()})\n    p.grad = torch.ones(2, 3)\n   "
        " optimizer.step()\n    print(type(optimizer).__name__, len(memory.state()), bool((p !="
        " 1).any()), p.requires_grad)\nprint('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    kinds = {"AdamATan2": 3, "Adadelta": 3, "AdamW": 3, "Muon": 1, "SGD": 1}
    assert (
        done.stdout
        == "".join(f"{kind} {count} True True\n" for kind, count in kinds.items()) + "False\n"
    ), done.stderr
