"""Attention within documents, when a row of a batch has several: how each position knows what it
may see.

- On a CPU by the lengths of the documents, one after another (`attention.attention_within`).
- On a GPU in half precision by PyTorch's `varlen_attn`, which skips what a mask would hide.
- Elsewhere by a mask.
"""

# B batch, L positions, T positions of all rows, H heads, K head width, N documents of all rows

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# each document, present or not, takes so many rows of float32 in the kernel's backward pass
PADDING = 128
# by how many times the rows of the batch this may grow
MOST_PADDING = 2


class Packed(NamedTuple):
    """Documents that follow one another through the rows of a batch. The number of bounds is that
    of all documents for which there is room, so that it is the same in each step.
    """

    bounds: Tensor  # [N + 1] where each document begins and the last one ends; int32
    longest: int  # no document is longer


# what positions see of each other: a mask; or documents, within which they see themselves and those
# before them, as the lengths of all or as bounds; None: the caller says whether attention is causal
Sees = Tensor | list[int] | Packed | None


_varlen: Callable[..., Any] | None = None


def load_kernel() -> None:
    """Imports `varlen_attn` if this machine can use it. This takes a second, and is done before a
    net is traced.
    """
    global _varlen
    if (
        # needs NVIDIA's Ampere or later, on which FlashAttention runs
        not torch.cuda.is_available()
        or torch.version.hip is not None
        or torch.cuda.get_device_capability() < (8, 0)
    ):
        return
    from torch.nn.attention.varlen import varlen_attn

    _varlen = varlen_attn


def within(documents_BL: Tensor, most: int, dtype: torch.dtype, head_width: int) -> Sees:
    """Returns what each position sees: itself and those before it in its document.

    `documents_BL` has the number of each position's document, and a row has at most `most` of them
    (0: unknown). On a CPU, whose memory the host reads without waiting, a mask takes 1.2 to 5 times
    as long as the lengths. Compiled code and other devices get a mask or bounds, which have one
    shape whatever the documents.
    """
    if documents_BL.device.type == "cpu" and not torch.compiler.is_compiling():
        # a document ends where the next one begins, and the last one with the last row
        ends = torch.tensor([documents_BL.numel()])
        return torch.cat((_begins(documents_BL).nonzero()[:, 0], ends)).diff().tolist()
    if suits_kernel(documents_BL.device, documents_BL.shape[1], most, dtype, head_width):
        return packed(documents_BL, most)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


def suits_kernel(
    device: torch.device, length: int, most: int, dtype: torch.dtype, head_width: int
) -> bool:
    """The kernel takes such heads, and its padding stays small."""
    return (
        _varlen is not None
        and device.type == "cuda"
        and dtype.itemsize == 2
        and head_width % 8 == 0
        and head_width <= 256
        and 0 < most * PADDING <= length * MOST_PADDING
    )


def packed(documents_BL: Tensor, most: int) -> Packed:
    """Finds where documents begin, without a wait for the device. Absent documents are empty, and
    come last.
    """
    batch, length = documents_BL.shape
    # numbered through all rows, the beginning of document n is the first position whose number is
    # n: a binary search finds it, and its result has a fixed shape
    number_T = _begins(documents_BL).cumsum(0) - 1
    searched = torch.arange(batch * most + 1, device=documents_BL.device)
    bounds = torch.searchsorted(number_T, searched, out_int32=True)
    torch._assert_async(bounds[-1] == batch * length, "a row has more documents than its data said")
    return Packed(bounds, length)


def attention_packed(
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    documents: Packed,
    shared_keys: bool = False,
) -> Tensor:
    """Attends causally within documents by `varlen_attn`."""
    assert _varlen is not None
    # the kernel reads all rows as one sequence [T, H, K]
    query, key, value = (
        heads_BHLK.transpose(1, 2).flatten(0, 1)
        for heads_BHLK in (query_BHLK, key_BHLK, value_BHLK)
    )
    if shared_keys:  # the kernel of torch 2.11 takes as many keys as queries
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    bounds, longest = documents
    mixed_THK = _varlen(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0))
    batch, _, length, _ = query_BHLK.shape
    return mixed_THK.unflatten(0, (batch, length)).transpose(1, 2)


def _begins(documents_BL: Tensor) -> Tensor:
    """Marks the positions of all rows at which a document begins."""
    return (documents_BL.diff(prepend=documents_BL[:, :1] - 1) != 0).flatten()
