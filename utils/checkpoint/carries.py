"""State that slots carry from step to step: by micro-batch in training, by shard in checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint import nested


class Carries:
    """The carries of one rank's micro-batches; only the objective knows what a carry contains."""

    def __init__(self, shard_groups: Sequence[Sequence[int]], fresh: Callable[[], Any]) -> None:
        """`shard_groups` are this rank's shards, one group for each micro-batch.

        `fresh` makes the initial carry of one shard, which restored carries must match.
        """
        self._shard_groups = shard_groups
        self._fresh = functools.cache(
            lambda: {name: tensor.to("meta") for name, tensor in nested.flatten(fresh()).items()}
        )
        self._carries: list[Any] = [None] * len(shard_groups)
        # what a checkpoint held, until the first step asks for it
        self._saved: Mapping[int, Mapping[str, Tensor]] = {}

    def get(self, number: int, fresh: Callable[[], Any]) -> Any:
        """Returns the carry of a micro-batch, by its number; `fresh` makes its first one."""
        if self._carries[number] is not None:
            return self._carries[number]
        carry, shards = fresh(), self._shard_groups[number]
        saved = [self._saved[shard] for shard in shards if self._saved.get(shard)]
        if len(saved) < len(shards):
            return carry
        return nested.rebuild(
            carry, {name: torch.cat([shard[name] for shard in saved]) for name in saved[0]}
        )

    def put(self, carries: Iterable[Any]) -> None:
        """Stores the carries after a step; None makes a micro-batch begin with a fresh one."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Returns every shard's carry for a checkpoint; before the first step, the restored one."""
        by_shard = {
            shard: dict(self._saved.get(shard, {}))
            for group in self._shard_groups
            for shard in group
        }
        for shards, carry in zip(self._shard_groups, self._carries, strict=True):
            if carry is not None:
                pieces = nested.split(carry, len(shards))
                for shard, piece in zip(shards, pieces, strict=True):
                    by_shard[shard] = nested.flatten(piece)
        return by_shard

    def like(self, saved: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """Returns the shapes that a shard's saved carry must have: those of a fresh carry, or none
        if nothing was saved.
        """
        return self._fresh() if saved else {}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restores saved carries, however they were cut into micro-batches."""
        self._carries, self._saved = [None] * len(self._shard_groups), saved
