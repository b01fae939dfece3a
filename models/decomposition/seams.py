"""Places in a frozen net where something else may compute in a matrix's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.decomposition.toy import Transposed
from models.layers import Embedding, Linear

# A matrix is W [inputs, outputs], as it is multiplied from the right


@dataclass(frozen=True)
class Seam:
    """One matrix of a net, by the name of its module."""

    name: str
    module: Any

    @property
    def matrix(self) -> Tensor:
        if isinstance(self.module, Transposed):
            return self.module.matrix
        return self.module.embedding_weight if self.indexed else self.module.weight.t()

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    @property
    def indexed(self) -> bool:
        """Returns whether inputs are row indices."""
        return isinstance(self.module, Embedding)

    def times(self, x: Tensor, matrix: Tensor) -> Tensor:
        """An input times a matrix with as many rows as this one."""
        return F.embedding(x, matrix) if self.indexed else x @ matrix


def seams_of(net: nn.Module) -> dict[str, Seam]:
    """All there are, by name."""
    return {
        name: Seam(name, module)
        for name, module in net.named_modules()
        if isinstance(module, Linear | Embedding | Transposed)
    }


def ties(seams: list[Seam]) -> dict[int, tuple[int, bool]]:
    """Finds matrices that share their numbers with an earlier one.

    Returns, by the later one's number, the number of the first that has them and whether the later
    one has them transposed.
    """
    tied: dict[int, tuple[int, bool]] = {}
    for later, seam in enumerate(seams):
        for first, other in enumerate(seams[:later]):
            if first not in tied and _where(seam.matrix) == _where(other.matrix):
                same_order = seam.matrix.stride() == other.matrix.stride()
                transposed = not same_order or seam.matrix.shape != other.matrix.shape
                tied[later] = (first, transposed)
    return tied


def _where(matrix: Tensor) -> tuple[int, int]:
    """Returns a matrix's storage address and offset; on the meta device every `data_ptr` is 0."""
    return matrix.untyped_storage()._cdata, int(matrix.storage_offset())


@contextmanager
def replaced(
    seams: Mapping[str, Seam], instead: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Within it these compute in the place of the modules."""
    try:
        for name, compute in instead.items():
            seams[name].module.forward = compute
        yield
    finally:
        for name in instead:
            seams[name].module.__dict__.pop("forward", None)
