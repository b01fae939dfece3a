"""All ranks start from the same bits, and can prove it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from utils.ranks.distributed import Dist

LANE = 4096  # words per row when a tensor's bits are laid out for the checksum


@torch.no_grad()
def same_everywhere(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    """Give every rank rank 0's parameters and buffers, then compare what arrived."""
    if dist.world_size == 1:
        return
    _check_layout(tensors, dist)
    for tensor in tensors.values():
        message = tensor.contiguous()
        if message.numel():
            dist.broadcast(_bytes(message))
        if message is not tensor:
            tensor.copy_(message)
    check_same(tensors, dist)


@torch.no_grad()
def check_same(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    """Raise on every rank when some tensor's bits differ between ranks, naming the first one and the ranks."""
    if dist.world_size == 1 or not tensors:
        return
    _check_layout(tensors, dist)
    sums = torch.stack([checksum(tensor).to(dist.device) for tensor in tensors.values()])
    sums_RT = torch.stack(dist.all_gather(sums)).cpu()  # R ranks, T tensors
    differs_RT = sums_RT != sums_RT[0]
    for column, name in enumerate(tensors):
        ranks = differs_RT[:, column].nonzero().flatten().tolist()
        if ranks:
            raise RuntimeError(f"{name} differs between ranks: rank {_list(ranks)} from rank 0; all ranks must hold the same weights")


def checksum(tensor: Tensor) -> Tensor:
    """A whole number from all bits, exact on any device: integer sums wrap, so the order of adding cannot matter."""
    bits = _bytes(tensor.detach().contiguous())
    if bits.storage_offset() % 8:
        bits = bits.clone()  # words can be read only from an aligned address
    words = bits[: bits.numel() // 8 * 8].view(torch.int64)
    rest = bits[words.numel() * 8 :].long()
    rows = words[: words.numel() // LANE * LANE].view(-1, LANE)
    parts = (rows.sum(0), rows.sum(1), words[rows.numel() :], rest)
    # Sums of rows and of columns, each weighted by its place: exchanged values are noticed without weighting every word.
    return torch.stack([_weighted(part, salt) for salt, part in enumerate(parts)]).sum()


def _weighted(values: Tensor, salt: int) -> Tensor:
    places = torch.arange(values.numel(), device=values.device, dtype=torch.int64)
    mixed = (places * 4 + salt) * 0x1E3779B97F4A7C15
    return (values * (mixed ^ (mixed >> 31) | 1)).sum()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _check_layout(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    everyone = dist.all_gather_text("\n".join(lines))
    for rank, text in enumerate(everyone):
        if text != everyone[0]:
            theirs, ours = text.splitlines(), everyone[0].splitlines()
            first = next(
                (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), (f"{len(ours)} tensors", f"{len(theirs)} tensors")
            )
            raise RuntimeError(f"ranks built different nets: rank 0 has {first[0]}, rank {rank} has {first[1]}")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
