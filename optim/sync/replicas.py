"""Gives all ranks the same initial weights, and checks that they and the data are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from utils.errors import ConfigError, RunError, short
from utils.ranks.distributed import Dist


@torch.no_grad()
def broadcast_from_rank_0(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    """Broadcasts parameters and buffers from rank 0, then checks that all ranks hold the same."""
    if dist.world_size == 1:
        return
    _check_layout(tensors, dist)
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
    _check_layout(tensors, dist)
    # hashes are compared, as whole weights would be too much to send
    hashes = {name: sha256(tensor) for name, tensor in tensors.items()}
    if differing := _first_difference(hashes, dist):
        name, ranks = differing
        raise RunError(
            f"{name} differs between ranks: rank {ranks} from rank 0; all ranks must hold the same"
            " weights"
        )


def check_same_files(hashes: Mapping[str, str], dist: Dist) -> None:
    """Raises unless every rank has read the same files. Keys name them in the user's words."""
    if differing := _first_difference(hashes, dist):
        what, ranks = differing
        raise ConfigError(
            f"{what} of rank {ranks} differs from rank 0's; copy the same files to every host"
        )


def check_same_data(parts: Mapping[str, str], data_path: str | None, dist: Dist) -> None:
    """Raises unless every rank sees the same data."""
    if differing := _first_difference(parts, dist):
        part, ranks = differing
        raise ConfigError(
            f"data_path={short(data_path)}: {part} of rank {ranks} differs from rank 0's; give"
            " every host the same files, and let data depend on neither the rank, the time nor"
            " PYTHONHASHSEED"
        )


def sha256(tensor: Tensor) -> str:
    """The sha256 of a tensor's bits, on any device; 27M weights take a tenth of a second."""
    return hashlib.sha256(_bytes(tensor.detach().contiguous()).cpu().numpy().data).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _check_layout(tensors: Mapping[str, Tensor], dist: Dist) -> None:
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    everyone = dist.all_gather_text("\n".join(lines))
    for rank, text in enumerate(everyone):
        if text != everyone[0]:
            here, there = everyone[0].splitlines(), text.splitlines()
            pairs = [pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]]
            first, other = pairs[0] if pairs else (f"{len(here)} tensors", f"{len(there)} tensors")
            raise RunError(
                f"ranks built different nets: rank 0 has {first}, rank {rank} has {other}"
            )


def _first_difference(values: Mapping[str, str], dist: Dist) -> tuple[str, str] | None:
    """The first name whose value differs between ranks, and the ranks where it is not rank 0's."""
    if dist.world_size == 1 or not values:
        return None
    everyone = [json.loads(text) for text in dist.all_gather_text(json.dumps(dict(values)))]
    # a rank may lack a name that others have, which is a difference, too
    names = dict.fromkeys(name for of_rank in everyone for name in of_rank)  # in order, each once
    for name in names:
        of_ranks = [of_rank.get(name) for of_rank in everyone]
        if ranks := [str(rank) for rank, of in enumerate(of_ranks) if of != of_ranks[0]]:
            return name, ", ".join(ranks)
    return None
