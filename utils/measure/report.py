"""The contract of evaluations: predictions, the rows that ranks gather, and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from utils.measure.metrics import MetricSums

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Prediction:
    """The result of an objective on one evaluation batch."""

    metrics: MetricSums
    outputs: dict[str, Tensor] = field(default_factory=dict)  # one row per example; may be empty


@dataclass(frozen=True)
class Report:
    """The result of one evaluator on one set."""

    metrics: dict[str, float] = field(default_factory=dict)  # logged as `eval/name`, on every rank
    figures: dict[str, str] = field(default_factory=dict)  # SVG by name
    # content by file name; the report page shows `*.scene.json` (utils/measure/scene.py)
    files: dict[str, str | bytes] = field(default_factory=dict)
    # pages at the top of the run's directory, by file name, in place of earlier ones
    pages: dict[str, str] = field(default_factory=dict)
    text: str = ""  # for people, where an evaluation ends the run
    line: str = ""  # for people, behind the means in the log's line on every evaluation


class Evaluator(Protocol):
    """Measures one set of examples beyond sums; made anew for each evaluation of it."""

    @property
    def scalars(self) -> Sequence[str]:
        """The names of the metrics that it will report, unless it finds nothing to measure."""
        ...

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Take in one of this rank's batches, as read, and what was computed of it, on the device.
        Rows beyond `indices` are padding.
        """
        ...

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's findings: tensors of one length, which are gathered to rank 0; {} for
        none.
        """
        ...

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """On rank 0, from all ranks' rows on the CPU, in no particular order; {} where no rank had
        any.
        """
        ...


@runtime_checkable
class Recalls(Protocol):
    """An evaluator that also counts files that earlier evaluations of its set have left."""

    def recall(self, step: int, earlier: Callable[[str, int], Sequence[Path]]) -> None:
        """On rank 0, before `report`: which step this is after, and where the last so many of a
        name lie.
        """
        ...


class Folder(Protocol):
    """The folder for an evaluation's files."""

    @property
    def directory(self) -> Path: ...

    def say(self, text: str) -> None: ...

    def write_report(
        self, step: int, set_name: str, figures: Mapping[str, str], files: Mapping[str, str | bytes]
    ) -> None:
        """Figures and files of a step and a set, by name."""
        ...

    def write_page(self, name: str, content: str) -> None:
        """A page at the top of the run's directory, in place of an earlier one."""
        ...

    def earlier_files(self, step: int, set_name: str, name: str, most: int) -> Sequence[Path]:
        """Those of this name that evaluations of the set have left before a step, at most so many,
        the newest first.
        """
        ...
