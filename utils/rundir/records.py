"""Reads what a run has recorded: its configuration, its events, and its metrics as columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, with_config
from typing_extensions import TypedDict

from utils.errors import ConfigError
from utils.files import JSON_LIMIT, parse_json, read_bytes, read_yaml

KINDS = ("train", "eval")
LARGEST = sys.float_info.max


@with_config(ConfigDict(extra="allow"))
class Row(TypedDict):
    """A line of metrics.jsonl, with a number or null for each metric."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)]  # as the page's numbers go


@with_config(ConfigDict(extra="allow"))
class Event(Row):
    """A line of events.jsonl, with facts by the kind of event."""

    event: str
    time: FiniteFloat


ROW, EVENT = TypeAdapter[Any](Row), TypeAdapter[Any](Event)


@dataclass(frozen=True)
class MetricTable:
    """Rows in the order of their steps; values that are missing or not finite are NaN."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]  # by name, each as long as `steps`

    def column(self, name: str) -> np.ndarray:
        """Returns the values of a metric, all NaN if no row has it."""
        values = self.columns.get(name)
        return np.full(len(self.steps), np.nan) if values is None else values

    def by_step(self, name: str) -> dict[int, float]:
        """Returns the values of a metric, without steps that have none."""
        values = self.column(name)
        there = np.isfinite(values)
        return dict(zip(self.steps[there].tolist(), values[there].tolist(), strict=True))

    def seconds_of(self, part: str) -> float:
        """Returns the time of a part of all steps: a row logs its mean since the row before."""
        counts = np.diff(self.steps, prepend=0)
        return float(np.nansum(counts * self.column(f"speed/{part}_ms"))) / 1e3


def read_metrics(directory: Path) -> dict[str, MetricTable]:
    """Returns the rows of training and of evaluations, without damaged lines."""
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in read_lines(directory / "metrics.jsonl", ROW):
        held_out = any(name.startswith("eval/") for name in row)
        rows["eval" if held_out else "train"].append(row)
    return {kind: _table(rows[kind]) for kind in KINDS}


def read_lines(path: Path, kind: TypeAdapter[Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file that has one in each line. Others, such as one that a crash has
    cut, are left out.
    """
    rows = []
    with suppress(OSError, ValueError):
        for line in read_bytes(path, JSON_LIMIT).splitlines():
            with suppress(ValueError):
                rows.append(parse_json(line, kind))
    return rows


def _table(rows: list[dict[str, Any]]) -> MetricTable:
    rows.sort(key=lambda row: row["step"])
    columns = {}
    for name in sorted(set().union(*rows) - {"step"}):
        values = _numbers([row.get(name) for row in rows])
        if np.isfinite(values).any():
            columns[name] = values
    return MetricTable(np.array([row["step"] for row in rows], np.int64), columns)


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array([finite(value) for value in values], np.float64)  # None becomes NaN


def finite(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None."""
    return value if type(value) in (int, float) and abs(value) <= LARGEST else None


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the configuration that the run was started with; empty if it cannot be read."""
    try:
        return read_yaml(directory / "config.yaml")
    except ConfigError:
        return {}


def read_events(directory: Path) -> list[dict[str, Any]]:
    return read_lines(directory / "events.jsonl", EVENT)
