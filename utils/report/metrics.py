"""Reads metrics.jsonl as one column of numbers for each metric, and reduces columns to curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import read_bytes

LONGEST = 1 << 30  # bytes of metrics.jsonl
DIGITS = 5  # of a value on the page
KINDS = ("train", "eval")


@dataclass(frozen=True)
class Table:
    """Rows in the order of their steps; NaN stands for values that are missing or not finite."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]  # by name, each as long as `steps`

    def column(self, name: str) -> np.ndarray:
        """Returns the values of a metric, all NaN if no row has it."""
        values = self.columns.get(name)
        return np.full(len(self.steps), np.nan) if values is None else values

    def known(self, name: str) -> dict[int, float]:
        """Returns the values of a metric by step."""
        values = self.column(name)
        there = np.isfinite(values)
        return dict(zip(self.steps[there].tolist(), values[there].tolist(), strict=True))

    def seconds_of(self, part: str) -> float:
        """Returns the time of a part of all steps: a row logs its mean since the row before."""
        counts = np.diff(self.steps, prepend=0)
        return float(np.nansum(counts * self.column(f"speed/{part}_ms"))) / 1e3


def read_metrics(directory: Path) -> dict[str, Table]:
    """Returns the rows of training and of evaluations, without damaged lines."""
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in read_lines(directory / "metrics.jsonl"):
        if type(row.get("step")) is int and 0 <= row["step"] < 1 << 53:
            held_out = any(name.startswith("eval/") for name in row)
            rows["eval" if held_out else "train"].append(row)
    return {kind: _table(sorted(each, key=lambda row: row["step"])) for kind, each in rows.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that has one in each line."""
    try:
        lines = read_bytes(path, LONGEST).splitlines()
    except (OSError, ValueError):
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    names = sorted(set().union(*rows) - {"step"})
    columns = {name: _numbers([row.get(name) for row in rows]) for name in names}
    known = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    return Table(np.array([row["step"] for row in rows], np.int64), known)


def _numbers(values: Sequence[Any]) -> np.ndarray:
    try:
        numbers = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([number(value) for value in values], np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def number(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None."""
    try:
        return value if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None


def curves(table: Table, points: int) -> dict[str, Any]:
    """Returns at most `points` points of each metric: the means of as many rows each, with the
    least and the largest value where they differ.
    """
    count = min(len(table.steps), points)
    edges = np.arange(count + 1) * len(table.steps) // max(1, count)
    last = edges[1:] - 1
    metrics = {
        name: _curve(values, edges[:-1])
        for name, values in table.columns.items()
        if name != "time" and count
    }
    times = table.column("time")[last].tolist()
    return {"step": table.steps[last].tolist(), "time": times, "curves": metrics}


def _curve(values: np.ndarray, starts: np.ndarray) -> dict[str, list[float | None]]:
    there = np.isfinite(values)
    with np.errstate(all="ignore"):  # a mean of nothing is a gap
        means = np.add.reduceat(np.where(there, values, 0.0), starts)
        means /= np.add.reduceat(there, starts, dtype=np.int64)
        ends = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    mean, least, most = ([_round(each) for each in part.tolist()] for part in (means, *ends))
    return {"mean": mean} if mean == least == most else {"mean": mean, "min": least, "max": most}


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
