"""GPUs as a user writes them: `8x80`, or `2x80+24`."""

from __future__ import annotations

import re

from utils.errors import ConfigError, short

WRITTEN = re.compile(r"(\d{1,4}x)?\d+(\.\d+)?(\+(\d{1,4}x)?\d+(\.\d+)?)*", re.ASCII)


def gib_of_each(text: str) -> list[float]:
    """Returns the GiB of every GPU that `plan_cards` names."""
    terms = [part.rpartition("x") for part in text.split("+")] if WRITTEN.fullmatch(text) else []
    sizes = [float(memory) for count, _, memory in terms for _ in range(int(count or 1))]
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise ConfigError(
            f"plan_cards={short(text)}: write numbers of GPUs and their GiB, as 8x80, or 2x80+24"
        )
    return sizes
