"""Decides which metrics share a chart and the order of charts, and reduces columns of numbers to
curves.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.rundir.records import KINDS, MetricTable

Line = dict[str, str]  # kind (`train` or `eval`), name of the metric, label
SHARES = re.compile(r"accuracy|share|mfu|recall|valid|exact_match|^eval/exact/|pass@")
INTERVAL = re.compile(r"(.*)_(?:low|high|n)")  # bounds and sample size, beside a metric
NUMBERED = re.compile(r"(.*)[_@](\d+)")  # recall_0, recall_1, … are one chart
DIGITS = 5  # of a value on the page
FAMILY = 3  # numbered metrics from which they are one
FIRST, LAST = ("loss", "accuracy", "bpb", "match"), ("lr", "grad_norm", "param_norm", "update_norm")


def unit(name: str) -> str:
    """Returns the unit of a metric: %, bytes, ms, or none."""
    if SHARES.search(name):
        return "%"
    return "bytes" if "bytes" in name else "ms" if name.endswith("_ms") else ""


def charts_of(
    tables: Sequence[Mapping[str, MetricTable]], sets: set[str], judged: str
) -> list[dict[str, Any]]:
    """Returns the charts of all runs' metrics, that of the `judged` metric first.

    Metrics are `train/METRIC`, `eval/METRIC` or `eval/SET/METRIC`, and may go on with `/PART`;
    `sets` are the sets that have been evaluated.
    """
    names = {name for table in tables for kind in KINDS for name in table[kind].columns}
    charts: dict[str, list[Line]] = {}
    for name in sorted(names, key=_by_number):
        kind, *parts = name.split("/")
        bound = INTERVAL.fullmatch(name)
        if kind not in KINDS or not parts or (bound and bound[1] in names):
            continue
        set_name: list[str] = []
        whole = "/".join(["eval", *parts[1:]])
        if kind == "eval" and len(parts) > 1 and (parts[0] in sets or whole in names):
            if whole in names and _are_equal(tables, name, whole):
                continue  # the only set has what all sets have: once is enough
            set_name, parts = parts[:1], parts[1:]
        label = " · ".join([*set_name, *parts[1:]])
        charts.setdefault(parts[0], []).append({"kind": kind, "name": name, "label": label})
    charts = _join_families(charts)

    def rank(metric: str) -> tuple[int, int, str]:
        place = next((i for i, word in enumerate(FIRST, 1) if word in metric), len(FIRST) + 1)
        if any(line["name"] == judged for line in charts[metric]):
            place = 0
        return place + (len(FIRST) if metric in LAST else 0), len(metric), metric

    return [
        {
            "title": metric,
            "wide": rank(metric)[0] == 0,
            "unit": unit(charts[metric][0]["name"]),
            "lines": charts[metric],
        }
        for metric in sorted(charts, key=rank)
    ]


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts training before evaluations, and 2 before 10."""
    parts = [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
    return [(int(name.startswith("eval/")), ""), *parts]


def _are_equal(tables: Sequence[Mapping[str, MetricTable]], one: str, other: str) -> bool:
    return all(
        np.array_equal(table["eval"].column(one), table["eval"].column(other), equal_nan=True)
        for table in tables
    )


def _join_families(charts: Mapping[str, list[Line]]) -> dict[str, list[Line]]:
    numbered = {metric: match for metric in charts if (match := NUMBERED.fullmatch(metric))}
    sizes = Counter(match[1] for match in numbered.values())
    joined: dict[str, list[Line]] = {}
    for metric, lines in charts.items():
        family = numbered.get(metric)
        if family and sizes[family[1]] >= FAMILY:
            metric, number = family[1], family[2]
            lines = [line | {"label": f"{line['label']} {number}".strip()} for line in lines]
        joined.setdefault(metric, []).extend(lines)
    return joined


def speed_charts(tables: Sequence[Mapping[str, MetricTable]]) -> list[dict[str, Any]]:
    """Returns the charts of speed and memory."""
    names = {name for table in tables for name in table["train"].columns}
    ranks = {
        name: f"rank {match[1]}"
        for name in sorted(names, key=_by_number)
        if (match := re.fullmatch(r"memory/rank_(\d+)/peak_bytes", name))
    }
    parts = {"step": "whole step", "data_wait": "data", "all_reduce": "other ranks"}
    parts["checkpoint"] = "checkpoint"
    wanted = {
        "examples per second": {"speed/examples_per_s": ""},
        "time of a step": {f"speed/{part}_ms": label for part, label in parts.items()},
        "peak memory": ranks or {"memory/peak_bytes": ""},
        "model FLOPs utilisation": {"speed/mfu": ""},
    }
    return [
        {
            "title": title,
            "least": 0,
            "unit": unit(next(iter(labels))),
            "lines": [
                {"kind": "train", "name": name, "label": label}
                for name, label in labels.items()
                if name in names
            ],
        }
        for title, labels in wanted.items()
        if names & labels.keys()
    ]


def curves(table: MetricTable, points: int) -> dict[str, Any]:
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
    mean, least, most = ([_round(value) for value in part.tolist()] for part in (means, *ends))
    return {"mean": mean} if mean == least == most else {"mean": mean, "min": least, "max": most}


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
