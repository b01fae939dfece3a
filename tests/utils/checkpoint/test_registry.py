"""A checkpoint that does not fit is refused before anything of it is taken; and what is said of one
that does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from optim.adam_atan2 import AdamATan2
from optim.builtin import adadelta, adamw, muon, sgd
from optim.optimizer_state import OptimizerState
from optim.schedule import WarmupDecay
from tests.utils.checkpoint.helpers import as_it_is, declare
from utils.averages import EMA
from utils.checkpoint import reader
from utils.checkpoint.format import Slice
from utils.checkpoint.registry import Carries, Origin, Registry
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.measure.metrics import Meter
from utils.ranks.distributed import Dist

CARRY = {"z": torch.zeros(4, 3), "steps": torch.zeros(4, dtype=torch.int32)}
CPU = torch.device("cpu")


class TinyRun:
    """A run of two shards, as far as a checkpoint is concerned."""

    def __init__(
        self,
        optimizer: Callable[..., Any] = AdamATan2,
        total_steps: int = 100,
        evaluates: bool = False,
    ):
        self.net = nn.Linear(3, 2, bias=False)
        keys = {"lr": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95), "momentum": 0.9}
        taken = inspect.signature(optimizer).parameters
        named = [("weight", self.net.weight)]
        self.dense = optimizer(named, **{key: keys[key] for key in keys if key in taken})
        self.dense.param_groups[0]["base_lr"] = 0.5
        self.schedule = WarmupDecay(total_steps, 0, 0.1, None)
        self.ema, self.meter, self.carries = (
            EMA({"weight": self.net.weight}, {}, 0.9),
            Meter(2),
            Carries([range(2)], lambda: CARRY),
        )

        def origin() -> Origin:
            lr = 0.5 * self.schedule(self.saved.run_state.step)
            return Origin({"shards": 2}, "x", None, lr, {})

        self.saved = Registry(origin, as_it_is(), [] if evaluates else range(2))
        self.saved.add(
            "model", self.net.state_dict, self.net.load_state_dict, any_precision=evaluates
        )
        self.saved.add("ema", self.ema.state, self.ema.load, otherwise="use ema=false")
        if not evaluates:
            memory = OptimizerState([self.dense])
            self.saved.add("optimizer", memory.state, memory.load, memory.like)
            self.saved.add_by_shard(
                "carry",
                self.carries.state,
                self.carries.load,
                self.carries.like,
                any_precision=True,
            )
            self.saved.add_by_shard(
                "meter",
                partial(self.meter.state, range(2)),
                partial(self.meter.load, device=CPU),
                self.meter.like,
            )

    def trained(self, directory: Path, steps: int = 3) -> Path:
        """A checkpoint after some steps."""
        for _ in range(steps):
            self.net.weight.grad = torch.randn(2, 3)
            self.dense.step()
            self.ema.update()
            self.carries.put(
                [{name: torch.cat([tensor + 1, tensor + 2]) for name, tensor in CARRY.items()}]
            )
            self.meter.add({"loss": (torch.tensor(1.0), torch.tensor(2.0))})
            self.saved.run_state.step += 1
        writer = Writer(directory, Dist(), pytest.fail)
        writer.save(self.saved.run_state.step, *self.saved.snapshot())
        assert writer.wait() == ""
        return directory / f"step_{self.saved.run_state.step}"

    def restored(self, folder: Path) -> list[str]:
        """Goes on from a checkpoint; what is said of it."""
        checkpoint = reader.open_checkpoint(folder, self.saved.names)
        self.saved.check(checkpoint.groups, checkpoint.meta["step"])
        self.saved.load(checkpoint.groups)
        self.saved.run_state.load(checkpoint.meta)
        return self.saved.origin().differences(checkpoint.meta)


@pytest.mark.parametrize("optimizer", [AdamATan2, adadelta, adamw, muon, sgd])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_fits_is_taken(optimizer: Callable[..., Any], steps: int, tmp_path: Path) -> None:
    tiny, again = TinyRun(optimizer), TinyRun(optimizer)
    assert again.restored(tiny.trained(tmp_path, steps)) == []
    (groups, meta), (groups_again, meta_again) = tiny.saved.snapshot(), again.saved.snapshot()
    assert meta_again == meta
    assert again.saved.run_state.step == steps
    for group, tensors in groups.items():
        assert tensors.keys() == groups_again[group].keys()
        for name, tensor in tensors.items():
            one, two = (
                each.tensor if isinstance(each, Slice) else each
                for each in (tensor, groups_again[group][name])
            )
            assert torch.equal(one, two)
            assert one.dtype == two.dtype
    for each in (tiny, again):
        each.net.weight.grad = torch.ones(2, 3)
        each.dense.step()
    assert torch.equal(tiny.net.weight, again.net.weight)


def test_a_carry_may_go_on_in_another_precision(tmp_path: Path) -> None:
    """As bfloat16 on a GPU and float32 on a CPU are."""
    folder = TinyRun().trained(tmp_path)
    tensors = load_file(folder / "shards.safetensors")
    save_file(
        {name: t.bfloat16() if name.endswith("carry/z") else t for name, t in tensors.items()},
        folder / "shards.safetensors",
    )
    declare(folder)
    tiny = TinyRun()
    tiny.restored(folder)
    carry = tiny.carries.get(
        0, lambda: {name: torch.cat([tensor, tensor]) for name, tensor in CARRY.items()}
    )
    assert carry["z"].dtype == torch.float32
    assert carry["z"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4


# a group, the tensor there that is another or, for None, missing, and what is said of it
UNFIT: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("model", "weight", None, "model: weight is missing from it"),
    (
        "model",
        "weight",
        torch.ones(2, 3).double(),
        "model: weight is of torch.float64 there and of torch.float32 here",
    ),
    ("optimizer", "1/weight/exp_avg", torch.ones(2, 3), "optimizer: it holds 1/weight/exp_avg"),
    ("ema", "steps", None, "ema: steps is missing from it"),
    (
        "shards",
        "0/carry/z",
        torch.ones(4, 4),
        "shard 0, carry: z has shape (4, 4) there and (4, 3) here",
    ),
    ("shards", "1/carry/more", torch.ones(1), "shard 1, carry: it holds more"),
    ("shards", "0/meter/loss", torch.ones(2), "shard 0, meter: loss is of torch.float32"),
]


@pytest.mark.parametrize(("group", "name", "tensor", "problem"), UNFIT)
def test_what_does_not_fit_leaves_the_job_as_it_was(
    group: str, name: str, tensor: torch.Tensor | None, problem: str, tmp_path: Path
) -> None:
    folder, tiny = TinyRun().trained(tmp_path), TinyRun()
    file = folder / f"{group}.safetensors"
    tensors = load_file(file) | {name: tensor}
    save_file({key: each for key, each in tensors.items() if each is not None}, file)
    declare(folder)
    refused(tiny, folder, problem)
    if group in ("model", "ema") and "float64" not in problem:
        refused(TinyRun(evaluates=True), folder, problem)


def refused(tiny: TinyRun, folder: Path, problem: str) -> None:
    """In one line, and nothing is taken."""
    before = tiny.net.weight.clone()
    with pytest.raises(ConfigError) as caught:
        tiny.restored(folder)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(tiny.net.weight, before)
    state = (
        tiny.saved.run_state.step,
        tiny.ema.steps,
        tiny.meter.state([0]),
        tiny.carries.state()[0],
    )
    assert state == (0, 0, {0: {}}, {})


def test_a_longer_run_says_how_the_learning_rate_jumps(tmp_path: Path) -> None:
    folder = TinyRun(total_steps=10).trained(tmp_path)
    assert TinyRun(total_steps=10).restored(folder) == []
    (line,) = TinyRun(total_steps=20).restored(folder)
    assert (
        line == "the learning rate jumps at step 3 from 0.407252 to 0.475476, because the run has"
        " another length now"
    )
