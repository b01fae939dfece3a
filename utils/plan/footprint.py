"""Counts the memory of a pass on the meta device, which needs none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def peak(call: Callable[[], object], held: Iterable[Tensor]) -> int:
    """Returns the peak in bytes of what a call needs besides the held tensors.

    Operations are counted one by one: compiled code needs less in float32, and about as much in
    half precision (`models/layers.py`). Attention counts as one kernel that keeps no scores.
    """
    with _fused_attention(), _Living(held) as living:
        call()
    return living.peak


def size(tensors: Iterable[Tensor]) -> int:
    """The bytes of all tensors together; shared storage counts once."""
    return sum(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )


class _Living(TorchDispatchMode):
    """Counts the storages that operations create and release."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._storages = weakref.WeakSet(tensor.untyped_storage() for tensor in held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(Tensor, self._made, func(*args, **(kwargs or {})))

    def _made(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages.add(storage)
            weakref.finalize(storage, self._gone, storage.nbytes())
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
        return tensor

    def _gone(self, count: int) -> None:
        self._now -= count


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: inputs, output, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replaces attention, which PyTorch decomposes on the meta device."""
    original = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Any, **keys: Any) -> Tensor:
        attended: Tensor = _Attention.apply(q, k, v)
        return attended

    setattr(F, original.__name__, attend)
    try:
        yield
    finally:
        setattr(F, original.__name__, original)
