"""Nested state, such as an objective's carry: its tensors by name, split by shard, and rebuilt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def flatten(value: Any) -> dict[str, Tensor]:
    """Every tensor in dataclasses, dicts, tuples and lists, named by its path: `state/0`,
    `batch/inputs`.
    """
    tensors: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        assert name not in tensors, f"two tensors are named {name}"
        return tensors.setdefault(name, tensor)

    _map(note, value)
    return tensors


def rebuild(template: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The template's structure, devices and precision, with these tensors."""
    return _map(lambda name, old: tensors[name].to(old.device, old.dtype), template)


def split(value: Any, parts: int) -> list[Any]:
    """Splits every tensor into equal parts along its first dimension; returns views."""
    assert parts > 0, parts

    def part(index: int) -> Callable[[str, Tensor], Tensor]:
        def cut(name: str, tensor: Tensor) -> Tensor:
            rows, rest = divmod(tensor.shape[0], parts) if tensor.ndim else (0, 1)
            assert not rest, (
                f"{name or 'the tensor'} of shape {tuple(tensor.shape)} cannot be cut into {parts}"
                " equal parts"
            )
            return tensor[index * rows : (index + 1) * rows]

        return cut

    return [_map(part(index), value) for index in range(parts)]


def _map(function: Callable[[str, Tensor], Tensor], value: Any, name: str = "") -> Any:
    """Applies a function to every tensor and keeps the structure."""

    def below(key: object, child: Any) -> Any:
        return _map(function, child, f"{name}/{key}" if name else str(key))

    if value is None:
        return None
    if isinstance(value, Tensor):
        return function(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{key: below(key, getattr(value, key)) for key in names})
    if isinstance(value, Mapping):
        return {key: below(key, child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        items = [below(index, child) for index, child in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise TypeError(
        f"{name or 'the value'} is of type {type(value).__name__}; state is made of tensors, None,"
        " dataclasses, dicts, tuples and lists"
    )
