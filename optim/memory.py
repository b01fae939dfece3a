"""The states of PyTorch's optimizers as tensors by the names of their parameters.

Hyper-parameters are not among them: they are the configuration's.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Memory:
    """The state of optimizers that were given named parameters:
    `<optimizer>/<parameter>/<what>`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], refusing: bool = False) -> None:
        """`refusing`: steps may be refused, so that there may be nothing to remember after many of
        them.
        """
        self._optimizers, self._refusing = optimizers, refusing

    def state(self) -> dict[str, Tensor]:
        """Every tensor and counter; the tensors are live."""
        state: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                if "step" in group:
                    state[f"{number}/group{place}/step"] = torch.as_tensor(group["step"])
            for owner, _, parameter in _named(number, optimizer):
                state |= {
                    f"{owner}/{key}": tensor
                    for key, tensor in _tensors(optimizer.state.get(parameter, {})).items()
                }
        return state

    def like(self, saved: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns names and shapes that a checkpoint must hold: the state after a step. Fewer may
        be there only where no step was taken.
        """
        state = self.state()
        if (step == 0 or self._refusing) and saved.keys() == state.keys():
            return state
        for number, optimizer in enumerate(self._optimizers):
            for owner, group, parameter in _named(number, optimizer):
                for key, value in _twins(optimizer, group, parameter).items():
                    shape = parameter.shape if value.shape == (2, 2) else value.shape
                    state[f"{owner}/{key}"] = torch.empty(shape, dtype=value.dtype, device="meta")
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        # Not by `load_state_dict`, which loads torch.compile before anything else, for seconds, and
        # copies all tensors.
        by_owner: dict[str, list[str]] = defaultdict(list)
        for name in saved:
            owner, _, key = name.rpartition("/")
            by_owner[owner].append(key)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            for place, group in enumerate(optimizer.param_groups):
                if "step" in group:
                    group["step"] = int(saved[f"{number}/group{place}/step"])
            for owner, group, parameter in _named(number, optimizer):
                if own := by_owner.get(owner):
                    twins = _twins(optimizer, group, parameter)  # a counter may belong on the CPU
                    optimizer.state[parameter] = {
                        key: saved[f"{owner}/{key}"].to(twins[key].device) for key in own
                    }


def _named(
    number: int, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], nn.Parameter]]:
    """Every parameter, after what its state is named by and the group that it belongs to."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False):
            yield f"{number}/{name}", group, parameter


def _twins(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor
) -> dict[str, Tensor]:
    """Finds the state that an optimizer keeps for a parameter: steps a copy of it with a tiny
    parameter.
    """
    # some take no steps there
    tiny = nn.Parameter(
        torch.zeros(2, 2, dtype=like.dtype, device="cpu" if like.is_meta else like.device)
    )
    tiny.grad = torch.zeros_like(tiny)
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [tiny]}]
    twin.step()
    return _tensors(twin.state[tiny])


def _tensors(memory: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in memory.items() if value is not None}
