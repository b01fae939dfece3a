"""What the trials share: a batch that names missing keys, and the form of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from contract import Batch
from utils.errors import ConfigError, kind_of


class TriedBatch(dict[str, Tensor]):
    """A batch of a trial, which names missing keys."""

    def __init__(self, batch: Batch, what: str, reader: str, giver: str) -> None:
        """`reader` and `giver`: the methods of the objective and of the source."""
        super().__init__(batch)
        self._what, self._reader, self._giver = what, reader, giver

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"{self._what} has no {name}, only {', '.join(self)}; `{self._reader}` reads {name}, so"
            f" add it to the source's {self._giver}"
        )


def check_metrics(where: str, metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{where}: metrics are {kind_of(metrics)}; return a dict by name")
    for name, pair in metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                f"{where}: metric {name} is {kind_of(pair)}; return its (sum, count) as a tuple"
            )
