"""The states of PyTorch's optimizers, as tensors under the names of their parameters.

Hyper-parameters are not among them: they come from the configuration.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class OptimizerState:
    """The state of optimizers with named parameters. A tensor's name is
    `<number of the optimizer>/<parameter>/<key>`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], skips: bool = False) -> None:
        """`skips`: steps may be skipped, so that optimizers may have no state after many steps."""
        self._optimizers, self._skips = optimizers, skips

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors and counters; the tensors are live."""
        state: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                if "step" in group:
                    state[f"{number}/group{index}/step"] = torch.as_tensor(group["step"])
            for owner, _, parameter in _named(number, optimizer):
                state |= {
                    f"{owner}/{key}": tensor
                    for key, tensor in _tensors(optimizer.state.get(parameter, {})).items()
                }
        return state

    def like(self, saved: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns the names and shapes that a checkpoint must hold: those of the state after a
        step. Before any step was taken, there may be fewer.
        """
        state = self.state()
        if (step == 0 or self._skips) and saved.keys() == state.keys():
            return state
        for number, optimizer in enumerate(self._optimizers):
            for owner, group, parameter in _named(number, optimizer):
                for key, value in _state_like(optimizer, group, parameter).items():
                    shape = parameter.shape if value.shape == (2, 2) else value.shape
                    state[f"{owner}/{key}"] = torch.empty(shape, dtype=value.dtype, device="meta")
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores a saved `state`."""
        # `load_state_dict` would import torch.compile, which takes seconds, and copy all tensors
        by_owner: dict[str, list[str]] = defaultdict(list)
        for name in saved:
            owner, _, key = name.rpartition("/")
            by_owner[owner].append(key)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            for index, group in enumerate(optimizer.param_groups):
                if "step" in group:
                    group["step"] = int(saved[f"{number}/group{index}/step"])
            for owner, group, parameter in _named(number, optimizer):
                if own := by_owner.get(owner):
                    like = _state_like(
                        optimizer, group, parameter
                    )  # a counter may belong on the CPU
                    optimizer.state[parameter] = {
                        key: saved[f"{owner}/{key}"].to(like[key].device) for key in own
                    }


def _named(
    number: int, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], nn.Parameter]]:
    """Yields every parameter with its name in checkpoints and its group."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False):
            yield f"{number}/{name}", group, parameter


def _state_like(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> dict[str, Tensor]:
    """Returns a state such as an optimizer keeps for a parameter, by stepping a copy of the
    optimizer with a parameter of 2 × 2.
    """
    # some optimizers cannot step on the meta device
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    tiny = nn.Parameter(torch.zeros(2, 2, dtype=parameter.dtype, device=device))
    tiny.grad = torch.zeros_like(tiny)
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = (
        defaultdict(dict),
        [{**group, "params": [tiny], "param_names": ["of a trial"]}],
    )
    trial.step()
    return _tensors(trial.state[tiny])


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in state.items() if value is not None}
