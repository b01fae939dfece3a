"""Gives all ranks the same initial weights, and checks that they are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from utils.errors import RunError
from utils.ranks.alike import first_difference
from utils.ranks.distributed import Dist


@torch.no_grad()
def broadcast_from_rank_0(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    """Broadcasts parameters and buffers from rank 0, then checks that all ranks hold the same."""
    if dist.world_size == 1:
        return
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    everyone = [text.splitlines() for text in dist.all_gather_text("\n".join(lines))]
    for rank, there in enumerate(everyone):
        # the first line that differs, or the end of the shorter list
        for here, other in zip_longest(everyone[0], there, fillvalue="no more tensors"):
            if here != other:
                raise RunError(
                    f"ranks built different nets: rank 0 has {here}, rank {rank} has {other}"
                )
    for tensor in tensors.values():
        message = tensor.contiguous()  # backends send no other; a copy is copied back
        if message.numel():
            dist.broadcast(_bytes(message))
        if message is not tensor:
            tensor.copy_(message)
    check_same(tensors, dist)


@torch.no_grad()
def check_same(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    """Raises on every rank if a tensor's bits differ between ranks; names it and the ranks."""
    if dist.world_size == 1:
        return
    # hashes are compared, as whole weights would be too much to send
    hashes = {name: sha256(tensor) for name, tensor in tensors.items()}
    if differing := first_difference(hashes, dist):
        name, ranks = differing
        raise RunError(
            f"{name} differs between ranks: rank {ranks} from rank 0; all ranks must hold the same"
            " weights"
        )


def sha256(tensor: Tensor) -> str:
    """The sha256 of a tensor's bits, on any device; 27M weights take a tenth of a second."""
    return hashlib.sha256(_bytes(tensor.detach().contiguous()).cpu().numpy().data).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
