"""Tensors that are whole only one at a time, because all together might not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class OneByOne(Mapping[str, Tensor]):
    """Tensors, each of which is there only when it is accessed. All ranks access all of them, in
    the same order: to bring one may take messages between ranks.
    """

    def __init__(self, shapes: Mapping[str, Tensor], bring: Callable[[str], Tensor]) -> None:
        """`shapes` are types and shapes, the same on all ranks; content does not matter."""
        self.shapes, self._bring = shapes, bring

    def __getitem__(self, name: str) -> Tensor:
        return self._bring(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
