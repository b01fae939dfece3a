"""Reads what the page shows of a run directory. A file that is missing or damaged leaves a gap."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from utils.checkpoint.folders import STEP
from utils.command.root import Expected
from utils.errors import ConfigError, short
from utils.files import OBJECT, read_bytes, read_json, read_row
from utils.measure.scene import SUFFIX
from utils.report.charts import curves, unit
from utils.report.history import Elapsed, command, digests, time_spent, timeline
from utils.report.page import escape
from utils.rundir.records import MetricTable, read_config, read_events
from utils.rundir.status import STATUS_FILE, state_of

Payload = dict[str, Any]
COSTS = re.compile(r"loss|bpb|error|perplexity")  # metrics where lower is better
CURVES_BYTES, POINT_BYTES = 150_000, 24  # for all curves; of a point with its extremes
SCENES_BYTES = 250_000  # for all scenes
MOST_POINTS, LEAST_POINTS = 500, 20
MOST_EVENTS, MOST_DIGESTS, MOST_FILES, LOG_LINES = 400, 200, 60, 30
LOG_LIMIT = 1 << 26  # bytes


def read_run(directory: Path, tables: Mapping[str, MetricTable], together: int = 1) -> Payload:
    """Returns what the page shows of one run with these metrics. Of each of several runs shown
    `together` it returns less, and no scenes.
    """
    events = read_events(directory)
    config = read_config(directory)
    starts = [event for event in events if event["event"] == "started"]
    status = read_row(directory / STATUS_FILE)
    clock = Elapsed(tables, events)
    metric = str(config.get("objective_metric") or "")
    curve_count = sum(len(table.columns) for table in tables.values())
    points = CURVES_BYTES // (POINT_BYTES * max(1, curve_count) * together)
    points = max(LEAST_POINTS, min(MOST_POINTS, points))
    steps = [int(table.steps[-1]) for table in tables.values() if len(table.steps)]
    run = {
        "name": str(config.get("run_name") or directory.absolute().name),
        "project": str(config.get("project_name") or ""),
        "directory": str(directory),
        "status": {"state": state_of(directory), "reason": status.get("reason")},
        "step": max(steps, default=status.get("step")),
        "started": starts[-1] if starts else {},
        "seconds": clock.last,
        "headline": headline(tables["eval"], metric),
        "expected": expectation(config.get("expected"), tables["eval"], metric),
        "speed": median_speed(tables["train"]),
        "config": dict(flatten(config)),
        "spent": time_spent(tables["train"], events, clock.last),
        "timeline": timeline(events, clock)[-MOST_EVENTS // together :],
        "digests": digests(directory, events)[-MOST_DIGESTS // together :],
        "exact": config.get("exact") is True,
        "code": read_code(directory),
        "command": command(starts[-1]) if starts else "",
        "log": _lines(directory / "log.txt")[-LOG_LINES // together :],
    }
    for kind, table in tables.items():
        run[kind] = reduced = curves(table, points)
        if together > 1:
            reduced["curves"] = {
                name: {"mean": curve["mean"]} for name, curve in reduced["curves"].items()
            }
        reduced["seconds"] = [clock(moment) for moment in reduced.pop("time")]
    found = read_evaluations(directory, SCENES_BYTES if together == 1 else 0)
    return run | found | {"files": found["files"][: MOST_FILES // together]}


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields every value of a configuration as text, by its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, short(value, 300)


def headline(table: MetricTable, metric: str) -> Payload | None:
    """Returns the last and best value of the judging metric, with its interval if it has one."""
    name, lower = metric.removeprefix("-"), metric.startswith("-")
    if not name:
        return None
    row = {"name": name, "unit": unit(name), "lower": lower, "last": None}
    if not (values := table.by_step(name)):
        return row
    step, best = max(values), (min if lower else max)(values, key=lambda step: values[step])
    interval = {key: table.by_step(f"{name}_{key}").get(step) for key in ("low", "high", "n")}
    ends = {"last": values[step], "step": step, "best": values[best], "best_step": best}
    return row | ends | interval


def expectation(expected: Any, table: MetricTable, metric: str) -> Payload | None:
    """Returns the range in which the recipe expects a metric, and whether the run is on track; None
    if the recipe expects nothing.
    """
    try:
        expects = Expected.model_validate(expected)
    except ValueError:
        return None
    name = expects.metric
    judged = name == metric.removeprefix("-")
    lower = metric.startswith("-") if judged else bool(COSTS.search(name))
    points = [
        {"step": step, "low": low, "high": high} for step, (low, high) in sorted(expects.at.items())
    ]
    values = table.by_step(name)
    verdict, measured = "", None
    for point in points:
        # the first evaluation at that step or later
        step = min((step for step in values if step >= point["step"]), default=None)
        if step is not None:
            fine = values[step] <= point["high"] if lower else values[step] >= point["low"]
            verdict, measured = "on track" if fine else "behind", point
    row = {"name": name, "unit": unit(name), "points": points}
    return row | {"verdict": verdict, "measured": measured}


def median_speed(table: MetricTable) -> Payload:
    """Returns the median of each speed, null where none was logged."""
    speeds: Payload = {}
    for name in ("examples_per_s", "tokens_per_s", "step_ms"):
        values = list(table.by_step(f"speed/{name}").values())
        speeds[name] = float(np.median(values)) if values else None
    return speeds


def read_code(directory: Path) -> Payload:
    """Returns revision and branch, and whether there were changes that are not committed."""
    code = dict(line.split(": ", 1) for line in _lines(directory / "git.txt") if ": " in line)
    return {
        "revision": code.get("revision", ""),
        "branch": code.get("branch", ""),
        "changed": code.get("uncommitted changes") == "yes",
    }


def _lines(path: Path) -> list[str]:
    try:
        lines = read_bytes(path, LOG_LIMIT).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []
    return [line[:400] for line in lines]


def evaluated_sets(directory: Path) -> list[tuple[int, Path]]:
    """Returns the folders that evaluations have left, with their steps, the newest first."""
    folders = [
        (int(step[1]), folder)
        for folder in directory.glob("evaluations/step_*/*/")
        if (step := STEP.fullmatch(folder.parent.name))
    ]
    return sorted(folders, key=lambda found: (-found[0], found[1].name))


def read_evaluations(directory: Path, room: int) -> Payload:
    """Returns the scenes that fit in `room` bytes, the newest first, and the paths and sizes of all
    files.
    """
    scenes: list[Payload] = []
    files: list[Payload] = []
    for step, folder in evaluated_sets(directory):
        for file in sorted(folder.iterdir()):
            if not file.is_file():
                continue
            path = file.relative_to(directory).as_posix()
            files.append({"path": path, "bytes": file.stat().st_size})
            if not file.name.endswith(SUFFIX) or (scene := _read_scene(file, room)) is None:
                continue
            size = len(escape(scene))
            if size <= room:
                about = {"step": step, "set": unquote(folder.name)}
                scenes.append({**about, "name": file.name.removesuffix(SUFFIX), "scene": scene})
                room -= size
    return {"scenes": scenes, "files": files}


def _read_scene(file: Path, room: int) -> Payload | None:
    try:
        return read_json(file, OBJECT, limit=room) or None
    except ConfigError:
        return None
