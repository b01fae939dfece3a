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

    def __init__(self, parts: Sequence[Sequence[int]], beginning: Callable[[], Any]) -> None:
        """`beginning` makes the fresh carry of one shard, which restored carries must match."""
        self._parts = parts
        self._fresh = functools.cache(
            lambda: {
                name: tensor.to("meta") for name, tensor in nested.flatten(beginning()).items()
            }
        )
        self._carries: list[Any] = [None] * len(parts)
        # what a checkpoint held, until the first step asks for it
        self._saved: Mapping[int, Mapping[str, Tensor]] = {}

    def get(self, part: int, fresh: Callable[[], Any]) -> Any:
        """The carry of a micro-batch; `fresh` makes one for the first step."""
        if self._carries[part] is not None:
            return self._carries[part]
        carry, saved = (
            fresh(),
            [self._saved[shard] for shard in self._parts[part] if self._saved.get(shard)],
        )
        if len(saved) < len(self._parts[part]):
            return carry
        return nested.rebuild(
            carry, {name: torch.cat([shard[name] for shard in saved]) for name in saved[0]}
        )

    def put(self, carries: Iterable[Any]) -> None:
        """Stores the carries after a step; None makes a micro-batch begin with a fresh one."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Every shard's carry, for a checkpoint; before the first step, what was restored."""
        shares = {shard: dict(self._saved.get(shard, {})) for part in self._parts for shard in part}
        for part, carry in zip(self._parts, self._carries, strict=True):
            if carry is not None:
                shares |= {
                    shard: nested.flatten(piece)
                    for shard, piece in zip(part, nested.split(carry, len(part)), strict=True)
                }
        return shares

    def like(self, saved: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """The shapes that a shard's saved carry must have: a fresh carry's, or none if nothing was
        saved.
        """
        return self._fresh() if saved else {}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restores saved carries, however they were cut into micro-batches."""
        self._carries, self._saved = [None] * len(self._parts), saved
