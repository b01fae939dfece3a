"""The states of optimizers, as tensors for checkpoints: all that their `state_dict()` holds.

Hyper-parameters come from the configuration and are not saved, unless the optimizer has changed
them: a counter, the sum of weights of a schedule-free one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils.errors import ConfigError

VALUES = "values"  # everything of an optimizer but its tensors, as JSON
SET_BY_RUN = ("params", "param_names", "lr", "base_lr")  # in groups
Parameters = Mapping[str, nn.Parameter]


class OptimizerState:
    """The state of a run's optimizers. A tensor's name begins with the number of the optimizer, and
    in most with the parameter: `0/model.head.weight/exp_avg`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Parameters) -> None:
        """Called before the first step: only what groups hold beyond today's values is saved."""
        self._optimizers, self._parameters = optimizers, parameters
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._built = [
            [
                {key: _text(value) for key, value in group.items()}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ]

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors, which are live, and what else each optimizer holds."""
        tensors: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            if has_own_format(optimizer):
                packed = self._packed(optimizer.state_dict(), str(number), tensors)
            else:
                packed = [
                    self._packed(optimizer.state, str(number), tensors),
                    self._packed(self._changed(number), f"{number}/groups", tensors),
                ]
            values = np.frombuffer(json.dumps(packed).encode(), np.uint8).copy()
            tensors[f"{number}/{VALUES}"] = torch.from_numpy(values)
        return tensors

    def expected(self, saved: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns what a checkpoint must hold: whatever these optimizers have saved."""
        numbers = {str(number) for number, _ in enumerate(self._optimizers)}
        missing = torch.empty(0, dtype=torch.uint8, device="meta")
        there = {name: saved[name] for name in saved if name.partition("/")[0] in numbers}
        return {f"{number}/{VALUES}": missing for number in sorted(numbers)} | there

    def load(self, saved: Mapping[str, Tensor]) -> None:
        for number, optimizer in enumerate(self._optimizers):
            packed = json.loads(saved[f"{number}/{VALUES}"].numpy().tobytes())
            if has_own_format(optimizer):
                optimizer.load_state_dict(self._unpacked(packed, saved))
                continue
            # `load_state_dict` would round states to the type of their parameter
            state, groups = (self._unpacked(part, saved) for part in packed)
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, changed in zip(optimizer.param_groups, groups, strict=True):
                group.update(changed)

    def _changed(self, number: int) -> list[dict[str, Any]]:
        """Returns the values in each group that differ from those it was built with."""
        optimizer = self._optimizers[number]
        changed: list[dict[str, Any]] = []
        for group, built in zip(optimizer.param_groups, self._built[number], strict=True):
            changed.append({})
            for key in (key for key in group if key not in SET_BY_RUN):
                # tensors may change in place, which no comparison would show
                if isinstance(group[key], Tensor) or _text(group[key]) != built.get(key):
                    changed[-1][key] = group[key]
        return changed

    def _packed(self, value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
        """Returns what JSON can hold of a value, and puts its tensors into `tensors`."""
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            stays = value.is_cpu and self._device.type != "cpu"  # a counter, on the host
            return {"tensor": name} | ({"on": "cpu"} if stays else {})
        if isinstance(value, Mapping):
            items = []
            for key, child in value.items():
                parameter = self._names.get(key) if isinstance(key, nn.Parameter) else None
                packed = self._packed(child, f"{name}/{parameter or key}", tensors)
                items.append([{"parameter": parameter} if parameter else key, packed])
            return {"dict": items}
        if isinstance(value, list | tuple):
            children = enumerate(value)
            packed = [self._packed(child, f"{name}/{at}", tensors) for at, child in children]
            return {"list" if isinstance(value, list) else "tuple": packed}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        number, _, place = name.partition("/")
        raise ConfigError(
            f"optim.dense[{number}].optimizer: keeps a {type(value).__name__} as {place}, which no"
            " checkpoint can hold; keep tensors, numbers and texts, in lists and dicts"
        )

    def _unpacked(self, packed: Any, saved: Mapping[str, Tensor]) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((kind, content),) = [item for item in packed.items() if item[0] != "on"]
        if kind == "tensor":
            return saved[content].to(packed.get("on", self._device))
        if kind == "dict":
            unpacked = {}
            for key, child in content:
                at = self._parameters[key["parameter"]] if isinstance(key, dict) else key
                unpacked[at] = self._unpacked(child, saved)
            return unpacked
        children = [self._unpacked(child, saved) for child in content]
        return children if kind == "list" else tuple(children)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))


def has_own_format(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer saves more than its `state` and `param_groups`."""
    kind, usual = type(optimizer), torch.optim.Optimizer
    return (
        kind.state_dict is not usual.state_dict or kind.load_state_dict is not usual.load_state_dict
    )


def swapping(optimizers: Sequence[Any]) -> list[Any]:
    """Returns the optimizers that train one set of weights and evaluate another, as schedule-free
    ones do: they have `train()` and `eval()`.
    """
    return [made for made in optimizers if hasattr(made, "train") and hasattr(made, "eval")]


@contextmanager
def weights_to_evaluate(optimizers: Sequence[Any], parameters: Parameters) -> Iterator[None]:
    """A context in which the net has the weights that its optimizers want evaluated. Leaving it
    restores the others bit by bit, which `train()` after `eval()` does not.
    """
    swapped = swapping(optimizers)
    if not swapped:
        yield
        return
    trained = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for optimizer in swapped:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in swapped:
            optimizer.train()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(trained[name])


def _text(value: Any) -> str:
    """A value of a group as text, to see whether it changes; things that have none by identity."""
    return json.dumps(value, default=id, skipkeys=True)
