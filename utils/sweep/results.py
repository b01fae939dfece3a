"""Reads from run directories how each job of a sweep ended, its result and its time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from utils.files import LIMIT, read_bytes, read_text
from utils.rundir.status import other_writer, state_of

LONGEST = 16 * LIMIT  # bytes of metrics.jsonl
KILLED = "killed"  # its process is gone without having written how it ended


@dataclass(frozen=True)
class Result:
    """The result of one run; empty if it has none."""

    metric: str = ""  # by which the run is judged
    lower_is_better: bool = False
    values: tuple[tuple[int, float], ...] = ()  # step and value of each evaluation
    step: int | None = None
    seconds: float = 0.0  # of training, in all its starts

    @property
    def last(self) -> float | None:
        return self.values[-1][1] if self.values else None

    @property
    def best(self) -> float | None:
        return (
            (min if self.lower_is_better else max)(value for _, value in self.values)
            if self.values
            else None
        )


def result_in(directory: Path | None) -> Result:
    """Returns the result that a run directory has logged."""
    if directory is None:
        return Result()
    config, metrics = directory / "config.yaml", directory / "metrics.jsonl"
    try:
        metric = _metric_in(config, os.stat(config).st_mtime_ns)
        about = os.stat(metrics)
    except OSError:
        return Result()
    return _read(metrics, metric, about.st_mtime_ns, about.st_size)


def state_in(directory: Path | None) -> str:
    """Returns the state of a run; empty if none has begun."""
    if directory is None:
        return ""
    state = state_of(directory)
    return KILLED if state == "running" and not other_writer(directory) else state


@lru_cache(maxsize=4096)
def _read(path: Path, metric: str, changed: int, size: int) -> Result:
    """Reads metrics.jsonl; a file that has not changed is not read again."""
    name, lower_is_better = metric.removeprefix("-"), metric.startswith("-")
    try:
        rows = [row for row in map(_row, read_bytes(path, LONGEST).splitlines()) if row]
    except (OSError, ValueError):
        rows = []
    values = tuple(
        (row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)
    )
    trained = [
        (row["step"], row["speed/step_ms"])
        for row in rows
        if isinstance(row.get("speed/step_ms"), int | float)
    ]
    before = [0, *(step for step, _ in trained)]
    seconds = sum(
        (ms / 1000 * (step - former) for (step, ms), former in zip(trained, before, strict=False)),
        0.0,
    )
    return Result(name, lower_is_better, values, rows[-1]["step"] if rows else None, seconds)


def _row(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # a line that is being written
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


@lru_cache(maxsize=4096)
def _metric_in(path: Path, changed: int) -> str:
    """Returns the metric by which a run is judged, from its configuration."""
    try:
        config = yaml.safe_load(read_text(path))
    except (ValueError, yaml.YAMLError):
        config = None
    return str(config.get("objective_metric") or "") if isinstance(config, dict) else ""
