"""State that passes from step to step: by micro-batch in training, by shard in checkpoints. Only
the objective knows its structure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ByShard = Mapping[int, Mapping[str, Tensor]]


def cut(carries: Sequence[Any], shard_groups: Sequence[Sequence[int]]) -> ByShard:
    """Cuts the carries of micro-batches, which hold these shards, into one for each shard; a
    micro-batch that has none gives empty ones.
    """
    by_shard: dict[int, Mapping[str, Tensor]] = {}
    for shards, carry in zip(shard_groups, carries, strict=True):
        rows = {
            name: tensor.unflatten(0, (len(shards), len(tensor) // len(shards)))
            for name, tensor in flatten(carry).items()
        }
        for number, shard in enumerate(shards):
            by_shard[shard] = {name: tensor[number] for name, tensor in rows.items()}
    return by_shard


def join(saved: ByShard, shards: Sequence[int], fresh: Callable[[], Any]) -> Any:
    """Joins the carries of these shards to that of a micro-batch, in the structure of a `fresh`
    one; None if a shard has none.
    """
    pieces = [saved[shard] for shard in shards if saved.get(shard)]
    if len(pieces) < len(shards):
        return None
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return map_tensors(lambda name, old: joined[name].to(old.device, old.dtype), fresh())


def flatten(value: Any) -> dict[str, Tensor]:
    """Every tensor in dataclasses, dicts, tuples and lists, named by its path: `state/0`,
    `batch/inputs`.
    """
    tensors: dict[str, Tensor] = {}
    map_tensors(tensors.setdefault, value)
    return tensors


def map_tensors(function: Callable[[str, Tensor], Tensor], value: Any, name: str = "") -> Any:
    """Applies a function to the path and content of every tensor; returns the same structure."""

    def below(key: object, child: Any) -> Any:
        return map_tensors(function, child, f"{name}/{key}" if name else str(key))

    if value is None:
        return None
    if isinstance(value, Tensor):
        return function(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
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
