"""On an accelerator the host launches a step and goes on: it asks nothing whose answer it would
have to wait for.

Where there is none, the device is PyTorch's "meta", whose tensors have shapes and no values:
whoever reads one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain
from optim.sync import base
from tests.ranks import words
from tests.runs import FLOAT32, TINY_TRM
from tests.steps import steps_of, trainer_on
from utils.ranks.distributed import Dist

FAR = torch.device("meta")
BFLOAT16 = ["arch.forward_dtype=bfloat16"]
ATTENTION = [*TINY_TRM, *BFLOAT16, "micro_batch_size=12", "grad_clip=1.0"]
MLPS = words("arch.mlp_t=true arch.pos_encodings=none arch.no_ACT_continue=true")
MIXING = [*TINY_TRM, *FLOAT32, *MLPS]


def on_cuda(test: Callable[..., None]) -> Callable[..., None]:
    """Runs the test on a CUDA device if there is one."""
    return pytest.mark.cuda(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")(test)
    )


class Blocking(TorchDispatchMode):
    """Refuses copies to or from the device for which the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "_to_copy" and "device" in kwargs and kwargs["device"] != args[0].device:
            assert kwargs.get("non_blocking"), f"{func} waits"
        if name == "copy_" and args[0].device != args[1].device:
            assert args[2:3] == (True,), f"{func} waits"
        return func(*args, **kwargs)


class FromTheHost(TorchFunctionMode):
    """Refuses tensors that are made on the device of numbers that the host has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            assert torch.device(kwargs.get("device") or "cpu") != FAR, f"{func} waits"
        return func(*args, **kwargs)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., pretrain.Trainer]:
    """A trainer on a device that is a step behind and cannot be asked."""
    monkeypatch.setitem(base.LAG, "meta", 1)
    # all is finite, and nobody asks for anything
    monkeypatch.setattr(base, "_to_host", lambda tensor: lambda: [0.0] * len(tensor))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    return lambda *arguments: trainer_on(Dist(device=FAR), tmp_path / "run", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ATTENTION,
        pytest.param(MIXING, marks=pytest.mark.slow),
        pytest.param([*ATTENTION, "exact=true", "micro_batch_size=null"], marks=pytest.mark.slow),
    ],
)
def test_a_step_asks_the_device_nothing(
    arguments: list[str], far: Callable[..., pretrain.Trainer]
) -> None:
    trainer = far(*arguments)
    for take in steps_of(trainer, 3):
        assert trainer.sync.all_read is (trainer.step == 0), (
            "the newest step's answers are not read yet"
        )
        with Blocking(), FromTheHost():
            take()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: bool(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.ones(3).to(FAR),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.tensor([1.0], device=FAR),
        lambda x: x.index_copy_(0, torch.tensor([1], device=FAR), x[:1]),
    ],
)
def test_what_waits_would_be_noticed(wait: Callable[[torch.Tensor], object]) -> None:
    """Else the test above shows nothing."""
    with (
        Blocking(),
        FromTheHost(),
        pytest.raises((RuntimeError, NotImplementedError, TypeError, AssertionError)),
    ):
        wait(torch.ones(3, device=FAR))


@on_cuda
@pytest.mark.parametrize(
    "arguments",
    [[*ATTENTION, "compile=false"], [*MIXING, "compile=false"], [*MIXING, "compile=true"]],
)
def test_a_step_on_cuda_does_not_wait(arguments: list[str], tmp_path: Path) -> None:
    trainer = trainer_on(Dist(device=torch.device("cuda", 0)), tmp_path / "run", *arguments)
    for take in steps_of(trainer, 10):
        # compiled and captured before
        torch.cuda.set_sync_debug_mode("error" if trainer.step >= 6 else "default")
        try:
            take()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not trainer.sync.all_read
    trainer.sync.check_finite("raise", newest=True)
