"""Run on every rank by test_ddp_and_fsdp.py: what tests/test_ddp_and_fsdp.py does not see of real
runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from contract import Context, Noise, Objective, StepOut
from optim.averages import EMA
from optim.builtin import adamw
from optim.optimizer_state import VALUES, OptimizerState
from optim.sync.base import Sync
from tests.making import make_sync
from utils.errors import ConfigError, RunError
from utils.ranks import distributed
from utils.ranks.distributed import Dist

NOTHING = Context(0.0, Noise(0, 0, [0]))
WAYS: dict[str, Callable[[], Sync]] = {
    "ddp": partial(make_sync, "ddp"),
    "ddp that searches": partial(make_sync, "ddp", find_unused_parameters=True),
    "fsdp": partial(make_sync, "fsdp"),
}


class Tiny(Objective):
    """Three parameters, one of which a step may leave without a gradient."""

    def __init__(self, reach_all: bool = True, width: int = 5) -> None:
        super().__init__(
            nn.ParameterDict(
                {name: nn.Parameter(torch.ones(width)) for name in ("first", "second", "spare")}
            )
        )
        self.reach_all = reach_all

    def forward(self, batch: Any, carry: Any, ctx: Any) -> StepOut:
        loss = sum(
            (p * batch["x"]).sum()
            for name, p in self.model.items()
            if self.reach_all or name != "spare"
        )
        return StepOut(loss, torch.tensor(1.0), {}, carry)


def parameters_may_be_left_out(dist: Dist) -> None:
    """They count as zeros; DDP must be told."""
    for sync in (WAYS["ddp that searches"](), WAYS["fsdp"]()):
        sync.wrap(Tiny(reach_all=False), dist)
        for _ in range(2):
            step_of(sync)
            assert not sync.parameters["model.spare"].grad.any()
    sync = WAYS["ddp"]()
    sync.wrap(Tiny(reach_all=False), dist)
    with pytest.raises(RunError, match=r"^sync.find_unused_parameters=false: the last micro-batch"):
        step_of(sync)


def step_of(sync: Sync, width: int = 5) -> None:
    sync.zero()
    with sync.micro_batch(last=True):
        sync.forward({"x": torch.ones(width)}, None, NOTHING).loss.backward()
    sync.finish()


def parameters_have_one_type(dist: Dist) -> None:
    mixed = Tiny()
    mixed.model["spare"].data = mixed.model["spare"].data.double()
    with pytest.raises(ConfigError, match=r"^sync=fsdp: splits parameters of one type"):
        WAYS["fsdp"]().wrap(mixed, dist)


def shares_are_small(dist: Dist) -> None:
    """A rank's weights, averages and memories are its share of them; and what a forward has fetched
    is let go.
    """
    objective, sync, width = Tiny(width=400), WAYS["fsdp"](), 400
    sync.wrap(objective, dist)
    optimizer = adamw([*sync.parameters.items()], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    ema, memory = EMA(sync.parameters, 0.5), OptimizerState([optimizer], sync.parameters)
    step_of(sync, width)
    optimizer.step()
    of_optimizer = {name: held for name, held in memory.state().items() if VALUES not in name}
    for copies, tensors in ((1, sync.parameters), (1, ema.state()), (2, of_optimizer)):
        share = sum(tensor.numel() for tensor in tensors.values())
        assert share < copies * 3 * width / dist.world_size + 8 * len(tensors)
    places = {name: p.data_ptr() for name, p in sync.parameters.items()}
    assert all(
        p.to_local().data_ptr() == places[name] for name, p in objective.named_parameters()
    ), "they share memory"


def main() -> None:
    dist = distributed.start(device="cpu", timeout_s=60)
    try:
        shares_are_small(dist)
        parameters_have_one_type(dist)
        parameters_may_be_left_out(dist)
    finally:
        distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
