"""metrics.jsonl as curves: rows of numbers, reduced to a few hundred points that keep extremes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from utils.files import read_bytes

Row = dict[str, Any]
Column = list[float | None]
LONGEST = 1 << 30  # bytes of metrics.jsonl
DIGITS = 5  # of a value on the page


def read_rows(path: Path) -> tuple[list[Row], list[Row]]:
    """The rows of training and those of evaluations, each in the order of their steps."""
    try:
        data = read_bytes(path, LONGEST)
    except (OSError, ValueError):
        return [], []
    lines = [line for line in data.splitlines() if line]
    found = _parsed(data, lines)
    is_held_out = [b'"eval/' in line for line in lines]
    trained = [row for row, held_out in zip(found, is_held_out, strict=True) if not held_out]
    held_out = [row for row, is_one in zip(found, is_held_out, strict=True) if is_one]
    return _in_order(trained), _in_order(held_out)


def _parsed(data: bytes, lines: list[bytes]) -> list[Any]:
    """All lines in one go, which is fast; one by one where some of them are damaged."""
    try:
        *found, _ = json.loads(b"[%bnull]" % data.replace(b"\n", b","))
        if len(found) == len(lines):
            return found
    except (ValueError, RecursionError):
        pass
    return [_row(line) for line in lines]


def _in_order(found: list[Any]) -> list[Row]:
    rows = [row for row in found if type(row) is dict and _is_step(row.get("step"))]
    rows.sort(key=itemgetter("step"))
    return rows


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def names_in(rows: Sequence[Row]) -> list[str]:
    """Every metric that some row has."""
    return sorted(set().union(*rows) - {"step", "time"})


def columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Column]:
    """The finite numbers of some metrics; None where a row has none."""
    try:  # all at once, where every row has all of them
        found = list(zip(*map(itemgetter(*names), rows), strict=True)) if len(names) > 1 else []
    except KeyError:
        found = []
    if not found:
        return {name: column(rows, name) for name in names}
    return {name: _numbers(values) for name, values in zip(names, found, strict=True)}


def column(rows: Sequence[Row], name: str) -> Column:
    """The same of one metric."""
    try:
        return _numbers(list(map(itemgetter(name), rows)))
    except KeyError:
        return _numbers([row.get(name) for row in rows])


def _numbers(values: Sequence[Any]) -> Column:
    try:
        fine = abs(sum(values)) < math.inf
    except (TypeError, OverflowError):  # there are gaps, or texts
        fine = False
    return list(values) if fine else [number(value) for value in values]


def _sum(values: Iterable[float]) -> float:
    try:
        return float(sum(values))
    except OverflowError:
        return math.inf


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float and math.isfinite(value):
        return value
    return value if type(value) is int and abs(value) < 1 << 1000 else None


def reduced(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """Curves of at most so many points: mean, and where a point stands for several rows, their
    least and largest.
    """
    count = min(len(rows), max(1, points))
    edges = [len(rows) * i // count for i in range(count + 1)] if count else [0]
    spans = list(pairwise(edges))
    times = column(rows, "time")
    found = columns(rows, names_in(rows))
    curves = {name: curve for name, values in found.items() if (curve := _curve(values, spans))}
    return {
        "step": [rows[last - 1]["step"] for _, last in spans],
        "time": [_rounded(times[last - 1], 13) for _, last in spans],
        "curves": curves,
    }


def _curve(values: Column, spans: Sequence[tuple[int, int]]) -> dict[str, Column] | None:
    parts: list[Any] = [values[first:last] for first, last in spans]
    try:
        sums = [sum(part) for part in parts]
    except (TypeError, OverflowError):  # some rows have no value
        parts = [[value for value in part if value is not None] for part in parts]
        sums = [_sum(part) for part in parts]
    if not any(parts):
        return None
    counts = map(len, parts)
    mean = [
        _rounded(total / count) if count else None
        for total, count in zip(sums, counts, strict=True)
    ]
    least = [_rounded(min(part)) if part else None for part in parts]
    most = [_rounded(max(part)) if part else None for part in parts]
    return {"mean": mean} if mean == least == most else {"mean": mean, "min": least, "max": most}


def _rounded(value: float | None, digits: int = DIGITS) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
