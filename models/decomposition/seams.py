"""Finds the matrices of a frozen net, and replaces their computation for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.decomposition.toy import Transposed
from models.layers import Embedding, Linear

# A matrix W is [inputs, outputs]: y = x W

Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seam:
    """A matrix of a net, named after its module; or a part of a fused matrix's outputs, with the
    name that it would have as a module.
    """

    name: str
    module: Any
    part: tuple[int, int] | None = None  # the first of these outputs, and the one after the last

    @property
    def matrix(self) -> Tensor:
        if isinstance(self.module, Transposed):
            return self.module.matrix
        if self.indexed:
            return self.module.embedding_weight
        return self._rows_of(self.module.weight).t()

    @property
    def bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return None if bias is None else self._rows_of(bias)

    @property
    def indexed(self) -> bool:
        """Whether inputs are row indices, and not vectors."""
        return isinstance(self.module, Embedding)

    def times(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiplies an input by a matrix with as many rows as this one."""
        return F.embedding(x, matrix) if self.indexed else x @ matrix

    def original(self, x: Tensor) -> Tensor:
        """Computes the original outputs, also while the matrix is replaced."""
        if self.part is None:
            return type(self.module).forward(self.module, x)
        weight = self._rows_of(self.module.weight).to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def _rows_of(self, rows: Tensor) -> Tensor:
        return rows if self.part is None else rows[slice(*self.part)]


def seams_of(net: nn.Module) -> dict[str, Seam]:
    """Returns all matrices by name; the parts of a fused one follow it."""
    seams: dict[str, Seam] = {}
    parts: dict[str, Mapping[str, int]] = {}  # widths by name, by the name of the fused module
    # modules come before what is in them, so `fused` is known when its matrix is met
    for name, module in net.named_modules():
        above = f"{name}." if name else ""
        for fused, widths in getattr(module, "fused", {}).items():
            parts[f"{above}{fused}"] = widths
        if isinstance(module, Linear | Embedding | Transposed):
            seams[name] = Seam(name, module)
            first = 0
            for part, width in parts.get(name, {}).items():
                part_name = ".".join([*name.split(".")[:-1], part])
                seams[part_name] = Seam(part_name, module, (first, first + width))
                first += width
    return seams


def ties(seams: list[Seam]) -> dict[int, tuple[int, bool]]:
    """Finds matrices that share their weights with an earlier one.

    Returns, by the number of the later matrix, the number of the first one with these weights, and
    whether the later one has them transposed.
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
def replaced(seams: Mapping[str, Seam], instead: Mapping[str, Compute]) -> Iterator[None]:
    """Replaces the computation of the named matrices within a `with` block."""
    fused: dict[Any, list[tuple[Seam, Compute]]] = {}
    try:
        # on the instance, so that the class and other modules stay as they are
        for name, compute in instead.items():
            seam = seams[name]
            if seam.part is None:
                seam.module.forward = compute
            else:
                fused.setdefault(seam.module, []).append((seam, compute))
        # parts of one fused matrix are replaced together, as it has one forward pass
        for module, parts in fused.items():
            module.forward = partial(_in_parts, module, parts)
        yield
    finally:
        for name in instead:
            seams[name].module.__dict__.pop("forward", None)


def _in_parts(module: Any, parts: list[tuple[Seam, Compute]], x: Tensor) -> Tensor:
    """Computes a fused matrix part by part. Parts without a replacement use its own weights."""
    # from the first output to the last; outputs between the replaced parts are computed as before
    pieces, done = [], 0
    for seam, compute in sorted(parts, key=lambda part: part[0].part or (0, 0)):
        first, end = seam.part or (0, 0)
        if first > done:
            pieces.append(Seam("", module, (done, first)).original(x))
        pieces.append(compute(x))
        done = end
    if done < len(module.weight):
        pieces.append(Seam("", module, (done, len(module.weight))).original(x))
    # replaced parts may have more passes than those that are not masked
    shape = torch.broadcast_shapes(*(piece.shape[:-1] for piece in pieces))
    return torch.cat([piece.expand(*shape, -1) for piece in pieces], -1)
