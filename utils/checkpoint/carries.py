"""What slots remember from step to step: held by micro-batch while training, by shard in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint import nested


class Slots:
    """The carries of one rank's micro-batches."""

    def __init__(self, parts: Sequence[Sequence[int]], beginning: Callable[[], Any]) -> None:
        """`beginning` makes the fresh carry of one shard: what is restored must be like it."""
        self._parts, self._beginning = parts, beginning
        self._carries: list[Any] = [None] * len(parts)
        self._saved: Mapping[int, Mapping[str, Tensor]] = {}  # what a checkpoint held, until the first step asks for it

    def get(self, part: int, fresh: Callable[[], Any]) -> Any:
        """The carry a micro-batch goes on with; `fresh` makes the one of a beginning."""
        if self._carries[part] is not None:
            return self._carries[part]
        carry, saved = fresh(), [self._saved[shard] for shard in self._parts[part] if self._saved.get(shard)]
        if len(saved) < len(self._parts[part]):
            return carry
        template = nested.flatten(carry)
        joined = {name: torch.cat([shard[name] for shard in saved]).to(template[name].device) for name in saved[0]}
        return nested.rebuild(carry, joined)

    def put(self, carries: Iterable[Any]) -> None:
        """After a step: what each micro-batch left behind, None for a slot that begins anew."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Every shard's share, for a checkpoint; before the first step, what was restored."""
        shares = {shard: dict(self._saved.get(shard, {})) for part in self._parts for shard in part}
        for part, carry in zip(self._parts, self._carries, strict=True):
            if carry is not None:
                shares |= {shard: nested.flatten(piece) for shard, piece in zip(part, nested.split(carry, len(part)), strict=True)}
        return shares

    def check(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """A ConfigError unless `restore` can take these shares."""
        template = self._beginning() if any(saved.values()) else None
        for share in saved.values():
            if share:
                nested.rebuild(template, share)

    def restore(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Continue from saved shares, however they were cut into micro-batches."""
        self._carries, self._saved = [None] * len(self._parts), saved


def within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
