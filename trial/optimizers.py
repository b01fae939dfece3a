"""Tries the optimizers of a run on small parameters: before its first step, to see that a run can
train with them, and for the memory plan, to count their state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from optim.groups import build_dense, claimed
from optim.muon import Muon
from optim.optimizer_state import OptimizerState, swapping
from optim.schedule import set_lr
from utils.errors import ConfigError

ROWS, WIDTH, STEPS = 4, 3, 3
LR = 0.1  # large enough for updates to exceed rounding
NEAR = 1e-3  # rounding, as a share of the largest value
Parameters = Mapping[str, nn.Parameter]
ByKind = Mapping[tuple[int, int], list[str]]  # names, by the optimizer's number and dimensions


@dataclass(frozen=True)
class Trained:
    """Small parameters after a few steps."""

    optimizers: list[torch.optim.Optimizer]
    state: dict[str, Tensor]
    updates: dict[str, Tensor]  # by the optimizer's number and the name


def try_optimizers(config: Any, parameters: Parameters, splits_weights: bool) -> None:
    """Raises ConfigError for an optimizer with which no run can train, in some milliseconds.

    `splits_weights`: each rank holds some rows of a parameter, so rows alone must suffice.
    """
    small = _stand_ins(parameters, _by_kind(config, parameters))
    try:
        whole = _train(config, small)
    except ConfigError:
        raise
    except Exception:
        return  # real parameters may allow what small ones do not
    if splits_weights:
        _check_rows_suffice(config, small, whole)


def _check_rows_suffice(config: Any, small: Mapping[str, Tensor], whole: Trained) -> None:
    halves = []
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        halves.append(_train(config, {name: values[:, rows] for name, values in small.items()}))
    for name, tensor in (whole.state | whole.updates).items():
        optimizer = whole.optimizers[int(name.partition("/")[0])]
        if isinstance(optimizer, Muon):  # all ranks gather a matrix for it
            continue
        of_rows = [(half.state | half.updates)[name] for half in halves]
        # as FSDP's `whole_shape` decides
        of_parameter = small.get(name.split("/")[1])
        is_split = of_parameter is not None and tensor.shape == of_parameter.shape[1:]
        if not _fits(tensor, of_rows, is_split):
            raise ConfigError(
                f"sync=fsdp: {type(optimizer).__name__} needs whole parameters (its"
                f" {name.rpartition('/')[2]} differs where a rank has some rows alone); use"
                " sync=allreduce or ddp"
            )


def remembered(config: Any, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the shapes of the state that optimizers will keep for these parameters."""
    by_kind = _by_kind(config, parameters)
    state = _train(config, _stand_ins(parameters, by_kind)).state
    shapes = {}
    for (number, _), names in by_kind.items():
        prefix = f"{number}/{names[0]}/"
        of_kind = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        for name, (key, small) in product(names, of_kind.items()):
            parameter = parameters[name]
            shape = parameter.shape if small.shape == _shape(parameter) else small.shape
            full = torch.empty(shape, dtype=small.dtype, device="meta")
            shapes[f"{number}/{name}/{key}"] = full
    return shapes


def _by_kind(config: Any, parameters: Parameters) -> ByKind:
    by_kind: dict[tuple[int, int], list[str]] = {}
    for number, (_, names) in enumerate(claimed(config, parameters)):
        for name in names:
            by_kind.setdefault((number, parameters[name].ndim), []).append(name)
    return by_kind


def _stand_ins(parameters: Parameters, by_kind: ByKind) -> dict[str, Tensor]:
    """Returns for each kind, under the name of its first parameter, the values of a small one and
    its gradients in each step.
    """
    draws = torch.Generator().manual_seed(0)
    small = {}
    for names in by_kind.values():
        like = parameters[names[0]]
        values = torch.randn(1 + STEPS, *_shape(like), generator=draws)
        small[names[0]] = values.to("cpu" if like.is_meta else like.device, like.dtype)
    return small


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of the small parameter that is tried in place of this one."""
    return (ROWS, *[WIDTH] * parameter.ndim)[: parameter.ndim]


def _train(config: Any, small: Mapping[str, Tensor]) -> Trained:
    parameters = {name: nn.Parameter(tensors[0].clone()) for name, tensors in small.items()}
    gpus = [tensors.device for tensors in small.values() if tensors.is_cuda]
    # some optimizers begin with random numbers, and some compile their step
    with torch.random.fork_rng(devices=gpus[:1]), torch.compiler.set_stance("force_eager"):
        optimizers = build_dense(config, parameters)
        memory = OptimizerState(optimizers, parameters)
        for optimizer in swapping(optimizers):
            optimizer.train()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["base_lr"] = LR  # in place of that of the run, which may be tiny or 0
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = small[name][1 + step].clone()
            set_lr(optimizers, 1.0)
            for optimizer in optimizers:
                _step(optimizer)
    updates = {}
    for number, (_, names) in enumerate(claimed(config, parameters)):
        for name in names:
            updates[f"{number}/{name}/update"] = parameters[name].detach() - small[name][0]
    return Trained(optimizers, memory.state(), updates)


def _step(optimizer: Any) -> None:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    try:
        optimizer.step()
    except Exception as error:
        if "closure" not in str(error):
            raise
        raise ConfigError(
            f"optim.dense: {type(optimizer).__name__} wants a closure ({error}), but a run computes"
            " gradients once a step; use an optimizer that needs no more"
        ) from None
    if rates != [float(group["lr"]) for group in optimizer.param_groups]:
        raise ConfigError(
            f"optim.dense: {type(optimizer).__name__} sets its own lr in step(), but a run sets it"
            " before each step; let a class of optim.schedule return the factor"
        )


def _fits(whole: Tensor, halves: list[Tensor], is_split: bool) -> bool:
    """True if ranks with some rows each hold a tensor together, or each all of it."""
    if not is_split:
        return all(torch.equal(half, whole) for half in halves)
    together = torch.cat(halves)
    if together.shape != whole.shape:
        return False
    gap = (together.double() - whole.double()).abs().max()
    return bool(gap <= NEAR * whole.double().abs().max())
