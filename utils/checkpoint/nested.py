"""Nested state, such as what an objective carries from step to step: named, cut by shard and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.errors import ConfigError

FIX = "use the arch and data of the run that wrote it"


def flatten(value: Any) -> dict[str, Tensor]:
    """Every tensor in dataclasses, dicts, tuples and lists, named by the way to it: `state/0`, `batch/inputs`."""
    tensors: dict[str, Tensor] = {}

    def note(name: str, found: list[Tensor]) -> Tensor:
        assert name not in tensors, f"two tensors are named {name}"
        tensors[name] = found[0]
        return found[0]

    _map(note, [value])
    return tensors


def rebuild(template: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The template's structure, devices and precision with these tensors; all names and all shapes must fit."""
    expected = flatten(template)
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            where = "is missing from" if name not in tensors else "is only in"
            raise ConfigError(f"{name or 'the tensor'} {where} the saved state; {FIX}")
        there, here = tuple(tensors[name].shape), tuple(expected[name].shape)
        if there != here:
            raise ConfigError(f"{name or 'the tensor'} has shape {there} in the saved state and {here} here; {FIX}")
        theirs, ours = tensors[name].dtype, expected[name].dtype
        if theirs != ours and not (theirs.is_floating_point and ours.is_floating_point):
            raise ConfigError(f"{name or 'the tensor'} is of {theirs} in the saved state and of {ours} here; {FIX}")
    return _map(lambda name, found: tensors[name].to(found[0].device, found[0].dtype), [template])


def split(value: Any, parts: int) -> list[Any]:
    """The value in equal parts along the first dimension of every tensor: views of it, not copies."""
    assert parts > 0, parts

    def part(index: int) -> Callable[[str, list[Tensor]], Tensor]:
        def cut(name: str, found: list[Tensor]) -> Tensor:
            rows, rest = divmod(found[0].shape[0], parts) if found[0].ndim else (0, 1)
            assert not rest, f"{name or 'the tensor'} of shape {tuple(found[0].shape)} cannot be cut into {parts} equal parts"
            return found[0][index * rows : (index + 1) * rows]

        return cut

    return [_map(part(index), [value]) for index in range(parts)]


def concat(values: Sequence[Any]) -> Any:
    """Values of one structure, one after the other along the first dimension of every tensor."""
    assert values, "nothing to put together"
    return _map(lambda _, found: torch.cat(found), list(values))


def _map(function: Callable[[str, list[Tensor]], Tensor], values: list[Any], name: str = "") -> Any:
    """The structure that all values have, with every tensor replaced by what the function makes of theirs."""

    def below(key: object, children: list[Any]) -> Any:
        return _map(function, children, f"{name}/{key}" if name else str(key))

    first = values[0]
    kinds = {Tensor if isinstance(value, Tensor) else type(value) for value in values}  # a parameter is a tensor too
    assert len(kinds) == 1, f"{name or 'the value'} is of different kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if first is None:
        return None
    if isinstance(first, Tensor):
        return function(name, values)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{key: below(key, [getattr(value, key) for value in values]) for key in names})
    if isinstance(first, Mapping):
        assert all(value.keys() == first.keys() for value in values), f"{name or 'the value'} has different keys"
        return {key: below(key, [value[key] for value in values]) for key in first}
    if isinstance(first, tuple | list):
        assert len({len(value) for value in values}) == 1, f"{name or 'the value'} has different lengths"
        items = [below(index, list(children)) for index, children in enumerate(zip(*values, strict=True))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise TypeError(
        f"{name or 'the value'} is of type {type(first).__name__}; state is made of tensors, None, dataclasses, dicts, tuples and lists"
    )
