"""An optimizer and a schedule that remember; `test_prove.py` copies them to `optim`."""

import os
from typing import Any

import torch

from contract import RunLength

KIND = os.environ.get("MISTAKE", "")


class Attribute(torch.optim.SGD):
    """Its rate falls by an attribute, which no checkpoint holds."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += KIND == "attribute"
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (1 + self.calls))


class Remembers:
    """Counts its calls."""

    calls = 0

    def __init__(self, length: RunLength) -> None: ...

    def __call__(self, step: int) -> float:
        self.calls += KIND == "schedule"
        return 1 / (1 + self.calls)
