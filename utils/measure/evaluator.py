"""The contract of evaluations: predictions, the rows that ranks gather, and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from utils.errors import ConfigError
from utils.measure.metrics import MetricSums

Batch = dict[str, Tensor]  # tensors by name; the first dimension is the example


class TriedBatch(dict[str, Tensor]):
    """A batch of a trial, which says what it lacks."""

    def __init__(self, batch: Batch, what: str, reader: str, giver: str) -> None:
        """`reader` and `giver`: the methods of the objective and of the source."""
        super().__init__(batch)
        self._what, self._reader, self._giver = what, reader, giver

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"{self._what} has no {name}, only {', '.join(self)}; `{self._reader}` reads {name}, so"
            f" add it to the source's {self._giver}"
        )


@dataclass(frozen=True)
class Prediction:
    """The result of an objective on one evaluation batch."""

    metrics: MetricSums
    outputs: dict[str, Tensor] = field(default_factory=dict)  # one row per example; may be empty


@dataclass(frozen=True)
class Report:
    """The result of one evaluator on one set."""

    metrics: dict[str, float] = field(default_factory=dict)  # logged as `eval/name`, on every rank
    # content by file name; the report page shows `*.scene.json` (utils/measure/scene.py)
    files: dict[str, str | bytes] = field(default_factory=dict)
    text: str = ""  # printed at the end of the run
    line: str = ""  # printed after the means in the log's line on each evaluation


class Evaluator(Protocol):
    """Measures more than means on one set. A new one is made for each evaluation."""

    @property
    def scalars(self) -> Sequence[str]:
        """The names of the metrics that `report` returns, unless there is nothing to measure."""
        ...

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Adds one of this rank's batches, which is on the CPU, and its prediction, which is on the
        device; rows beyond `indices` are padding. Called on the rank that evaluates the batch.
        """
        ...

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's results as tensors of one length, which are gathered to rank 0; {} if
        there are none.
        """
        ...

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Returns metrics and files. Called on rank 0 with all ranks' rows, on the CPU and
        in no particular order; {} if no rank has any.
        """
        ...


class Folder(Protocol):
    """The folder for an evaluation's files."""

    @property
    def directory(self) -> Path: ...

    def say(self, text: str) -> None: ...

    def write_evaluation(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Writes the files of a step and a set, by name."""
        ...
