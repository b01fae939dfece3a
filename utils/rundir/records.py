"""Reads what a run has recorded: its configuration, its events, and its metrics as columns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from utils.files import read_bytes, read_text

ROWS_LIMIT = 1 << 30  # bytes of metrics.jsonl
KINDS = ("train", "eval")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast


@dataclass(frozen=True)
class MetricTable:
    """Rows in the order of their steps; NaN stands for values that are missing or not finite."""

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
    for row in read_lines(directory / "metrics.jsonl"):
        if type(row.get("step")) is int and row["step"] >= 0:
            held_out = any(name.startswith("eval/") for name in row)
            rows["eval" if held_out else "train"].append(row)
    return {kind: _table(rows[kind]) for kind in KINDS}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that has one in each line. A line that a crash has cut is
    left out.
    """
    try:
        lines = read_bytes(path, ROWS_LIMIT).splitlines()
    except (OSError, ValueError):
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
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
    try:
        numbers = np.array(values, np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        numbers = np.array([finite(value) for value in values], np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def finite(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the configuration that the run was started with; empty if it cannot be read."""
    try:
        config = yaml.load(read_text(directory / "config.yaml"), LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Returns the events of the run in their order."""
    return [
        row
        for row in read_lines(directory / "events.jsonl")
        if isinstance(row.get("event"), str)
        and isinstance(row.get("step"), int)
        and finite(row.get("time")) is not None
    ]
