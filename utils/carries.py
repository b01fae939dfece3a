"""State that belongs to shards and passes from step to step, in whatever structure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ByShard = Mapping[int, Mapping[str, Tensor]]


class Carries:
    """State that slots carry from step to step: by micro-batch in training, by shard when saved.

    Only the objective knows what a carry contains.
    """

    def __init__(self, shard_groups: Sequence[Sequence[int]], fresh: Callable[[], Any]) -> None:
        """`shard_groups` are this rank's shards, one group for each micro-batch.

        `fresh` makes the initial carry of one shard, which restored carries must match.
        """
        self._shard_groups = shard_groups
        self._fresh = functools.cache(
            lambda: {name: tensor.to("meta") for name, tensor in flatten(fresh()).items()}
        )
        self._carries: list[Any] = [None] * len(shard_groups)
        # what a checkpoint held, until the first step asks for it
        self._saved: ByShard = {}

    def get(self, number: int, fresh: Callable[[], Any]) -> Any:
        """Returns the carry of a micro-batch, by its number; `fresh` makes its first one."""
        if self._carries[number] is not None:
            return self._carries[number]
        carry, shards = fresh(), self._shard_groups[number]
        saved = [self._saved[shard] for shard in shards if self._saved.get(shard)]
        if len(saved) < len(shards):
            return carry
        joined = {name: torch.cat([shard[name] for shard in saved]) for name in saved[0]}
        return map_tensors(lambda name, old: joined[name].to(old.device, old.dtype), carry)

    def put(self, carries: Iterable[Any]) -> None:
        """Stores the carries after a step; None makes a micro-batch begin with a fresh one."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, Mapping[str, Tensor]]:
        """Returns every shard's carry for a checkpoint; before the first step, the restored one."""
        by_shard: dict[int, Mapping[str, Tensor]] = {
            shard: self._saved.get(shard, {}) for group in self._shard_groups for shard in group
        }
        for shards, carry in zip(self._shard_groups, self._carries, strict=True):
            if carry is not None:
                count = len(shards)
                cut = {
                    name: tensor.unflatten(0, (count, len(tensor) // count))
                    for name, tensor in flatten(carry).items()
                }
                for number, shard in enumerate(shards):
                    by_shard[shard] = {name: tensor[number] for name, tensor in cut.items()}
        return by_shard

    def like(self, saved: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """Returns the shapes that a shard's saved carry must have: those of a fresh carry, or none
        if nothing was saved.
        """
        return self._fresh() if saved else {}

    def load(self, saved: ByShard) -> None:
        """Restores saved carries, however they were grouped into micro-batches."""
        self._carries, self._saved = [None] * len(self._shard_groups), saved


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
