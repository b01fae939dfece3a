"""Reads metrics.jsonl as columns of numbers, and reduces them to a few points with extremes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import read_bytes

Row = dict[str, Any]
LONGEST = 1 << 30  # bytes of metrics.jsonl
MANY = 1 << 20  # bytes from which pyarrow is worth loading
BLOCK = 1 << 22  # bytes that pyarrow reads at once
DIGITS = 5  # of a value on the page
HELD_OUT = "eval/"  # the prefix of metrics that evaluations log


@dataclass(frozen=True)
class Table:
    """Rows in the order of their steps, with NaN for values that are missing or not finite."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]  # by name, each as long as `steps`

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> np.ndarray:
        """Returns the values of a metric, all NaN if no row has it."""
        values = self.columns.get(name)
        return np.full(len(self), np.nan) if values is None else values

    def known(self, name: str) -> list[tuple[int, float]]:
        """Returns step and value of each row that has the metric."""
        values = self.column(name)
        there = np.isfinite(values)
        return list(zip(self.steps[there].tolist(), values[there].tolist(), strict=True))

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.columns if name != "time"]

    def where(self, wanted: np.ndarray) -> Table:
        """Returns the rows at these indices, without columns that none of them has."""
        cut = {name: values[wanted] for name, values in self.columns.items()}
        columns = {name: values for name, values in cut.items() if np.isfinite(values).any()}
        return Table(self.steps[wanted], columns)


def read_tables(path: Path) -> tuple[Table, Table]:
    """Returns the tables that training and evaluations have logged."""
    data = _read(path)
    table = (_fast(data) if len(data) > MANY else None) or _from_rows(_parse(data))
    order = np.argsort(table.steps, kind="stable")
    held_out, trained = np.zeros(len(table), bool), np.zeros(len(table), bool)
    for name, values in table.columns.items():
        if name != "time":
            kind = held_out if name.startswith(HELD_OUT) else trained
            kind |= np.isfinite(values)
    trained &= ~held_out
    return table.where(order[trained[order]]), table.where(order[held_out[order]])


def read_rows(path: Path) -> list[Row]:
    """Returns every row as it was logged, in the order of steps."""
    rows = _parse(_read(path))
    rows.sort(key=itemgetter("step"))
    return rows


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, LONGEST)
    except (OSError, ValueError):
        return b""


def _fast(data: bytes) -> Table | None:
    """Reads a file with pyarrow; None if anything in it is unusual, so that it is read by line."""
    try:
        from pyarrow import BufferReader, json, types

        options = json.ReadOptions(use_threads=False, block_size=BLOCK)
        table = json.read_json(BufferReader(data), read_options=options)
        if len(table) != data.count(b"\n") or table["step"].null_count:
            return None
        if not types.is_int64(table["step"].type):
            return None
        columns = {
            name: _finite(table[name].to_numpy().astype(np.float64))
            for name in table.column_names
            if types.is_int64(table[name].type) or types.is_floating(table[name].type)
        }
    except Exception:  # pyarrow has many kinds of errors
        return None
    steps = columns.pop("step")
    return Table(steps.astype(np.int64), columns) if _fine(steps) else None


def _fine(steps: np.ndarray) -> bool:
    return bool(((steps >= 0) & (steps < 1 << 53)).all())


def _parse(data: bytes) -> list[Row]:
    """Returns each row that has a step, without damaged lines."""
    rows = (_row(line) for line in data.splitlines() if line)
    return [row for row in rows if type(row) is dict and _is_step(row.get("step"))]


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _from_rows(rows: Sequence[Row]) -> Table:
    names = sorted(set().union(*rows) - {"step"})
    columns = {name: _numbers(row.get(name) for row in rows) for name in names}
    return Table(np.array([row["step"] for row in rows], np.int64), columns)


def _numbers(values: Iterable[Any]) -> np.ndarray:
    numbers = (number(value) for value in values)
    return _finite(np.array([math.nan if each is None else each for each in numbers], np.float64))


def _finite(values: np.ndarray) -> np.ndarray:
    values[~np.isfinite(values)] = np.nan
    return values


def number(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None."""
    if type(value) is float and math.isfinite(value):
        return value
    return value if type(value) is int and abs(value) < 1 << 1000 else None


def downsample(table: Table, points: int, extremes: bool = True) -> dict[str, Any]:
    """Returns curves of at most `points` points. A point that stands for several rows is their
    mean, with their least and largest value if `extremes` are wanted.
    """
    count = min(len(table), max(1, points))
    edges = np.arange(count + 1) * len(table) // max(1, count)
    last = edges[1:] - 1
    curves = {}
    for name in table.metrics if count else ():
        curve = _curve(table.columns[name], edges[:-1])
        curves[name] = curve if extremes else {"mean": curve["mean"]}
    times = table.column("time")[last]
    return {
        "step": table.steps[last].tolist(),
        "time": [_round(time, 13) for time in times.tolist()],
        "curves": curves,
    }


def _curve(values: np.ndarray, starts: np.ndarray) -> dict[str, list[float | None]]:
    there = np.isfinite(values)
    with np.errstate(all="ignore"):  # a mean of nothing, or beyond all numbers, is a gap
        means = np.add.reduceat(np.where(there, values, 0.0), starts)
        means /= np.add.reduceat(there, starts, dtype=np.int64)
        ends = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    mean, least, most = ([_round(each) for each in part.tolist()] for part in (means, *ends))
    return {"mean": mean} if mean == least == most else {"mean": mean, "min": least, "max": most}


def _round(value: float, digits: int = DIGITS) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
