"""Refuses ranks that would train on different files or data, as hosts without a common disk may."""

from __future__ import annotations

import json
from collections.abc import Mapping

from utils.errors import ConfigError, short
from utils.ranks.distributed import Dist


def check_same_files(hashes: Mapping[str, str], dist: Dist) -> None:
    """Raises unless every rank has read the same files. Keys name them in the user's words."""
    if differing := first_difference(hashes, dist):
        what, ranks = differing
        raise ConfigError(
            f"{what} of rank {ranks} differs from rank 0's; copy the same files to every host"
        )


def check_same_data(parts: Mapping[str, str], data_path: str | None, dist: Dist) -> None:
    """Raises unless every rank sees the same data."""
    if differing := first_difference(parts, dist):
        part, ranks = differing
        raise ConfigError(
            f"data_path={short(data_path)}: {part} of rank {ranks} differs from rank 0's; give"
            " every host the same files, and let data depend on neither the rank, the time nor"
            " PYTHONHASHSEED"
        )


def first_difference(values: Mapping[str, str], dist: Dist) -> tuple[str, str] | None:
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
