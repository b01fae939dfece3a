"""What slots remember from step to step: held by micro-batch while training, by shard in a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint import nested


class Carries:
    """The carries of one rank's micro-batches. What a carry is made of, its objective alone knows."""

    def __init__(self, parts: Sequence[Sequence[int]], beginning: Callable[[], Any]) -> None:
        """`beginning` makes the fresh carry of one shard: what is restored must be like it."""
        self._parts = parts
        self._fresh = functools.cache(lambda: {name: tensor.to("meta") for name, tensor in nested.flatten(beginning()).items()})
        self._carries: list[Any] = [None] * len(parts)
        self._saved: Mapping[int, Mapping[str, Tensor]] = {}  # what a checkpoint held, until the first step asks for it

    def get(self, part: int, fresh: Callable[[], Any]) -> Any:
        """The carry a micro-batch goes on with; `fresh` makes the one of a beginning."""
        if self._carries[part] is not None:
            return self._carries[part]
        carry, saved = fresh(), [self._saved[shard] for shard in self._parts[part] if self._saved.get(shard)]
        if len(saved) < len(self._parts[part]):
            return carry
        return nested.rebuild(carry, {name: torch.cat([shard[name] for shard in saved]) for name in saved[0]})

    def put(self, carries: Iterable[Any]) -> None:
        """After a step: what each micro-batch left behind, None for one whose slots begin anew."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Every shard's share, for a checkpoint; before the first step, what was restored."""
        shares = {shard: dict(self._saved.get(shard, {})) for part in self._parts for shard in part}
        for part, carry in zip(self._parts, self._carries, strict=True):
            if carry is not None:
                shares |= {shard: nested.flatten(piece) for shard, piece in zip(part, nested.split(carry, len(part)), strict=True)}
        return shares

    def like(self, saved: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """What a shard's share must be like: a fresh carry, or nothing, as before the first step and after a refused one."""
        return self._fresh() if saved else {}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Continue from saved shares, however they were cut into micro-batches."""
        self._carries, self._saved = [None] * len(self._parts), saved
