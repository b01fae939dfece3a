"""Reads what the page shows of a run directory. A file that is missing or damaged leaves a gap."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import read_bytes, read_row, read_text
from utils.report.evaluations import files_of, read_pictures, read_scenes
from utils.report.page import escape
from utils.report.rows import Row, Table, downsample, number, read_tables
from utils.revision import LEFT_OUT
from utils.rundir.status import LOST, is_alive

Payload = dict[str, Any]
COSTS = re.compile(r"loss|bpb|error|perplexity")  # metrics where lower is better
MOST_MARKS = 400  # on the axes; if there are more, checkpoints are left out
CURVES_BYTES, POINT_BYTES = 150_000, 24  # for all curves; of a point with its extremes
LEAST_POINTS = 20
DEEPEST = 50  # levels of a configuration; ours have five
MOST_DIGESTS, MOST_FILES, LOG_LINES = 200, 60, 30
DIFF_BYTES = 20_000  # shown of uncommitted changes


def read_run(directory: Path, points: int = 500, room: int = 300_000, together: int = 1) -> Payload:
    """Returns everything the page shows of one run, with scenes and pictures as far as all of it
    fits in `room` bytes. If several runs are shown `together`, it shows less of each.
    """
    trained, held_out = read_tables(directory / "metrics.jsonl")
    config, events = read_config(directory / "config.yaml"), read_events(directory)
    starts = [event for event in events if event["event"] == "started"]
    clock = Elapsed([trained.column("time"), held_out.column("time")], events)
    metric = str(config.get("objective_metric") or "")
    curves = len(trained.metrics) + len(held_out.metrics)
    size = POINT_BYTES * max(1, curves) * together
    points = max(LEAST_POINTS, min(points, CURVES_BYTES // size))
    steps = [int(step) for table in (trained, held_out) for step in table.steps[-1:]]
    run = {
        "name": str(config.get("run_name") or directory.absolute().name),
        "project": str(config.get("project_name") or ""),
        "directory": str(directory),
        "status": read_status(directory),
        "step": max(steps, default=None),
        "started": starts[-1] if starts else {},
        "starts": [_start(event) for event in starts[-50:]],
        "seconds": clock.last,
        "headline": headline(held_out, metric),
        "expected": expectation(config.get("expected"), held_out, metric),
        "config": flatten(config),
        "train": _add_times(downsample(trained, points, together == 1), clock),
        "eval": _add_times(downsample(held_out, points, together == 1), clock),
        "marks": marks(events, clock, MOST_MARKS // together),
        "spent": time_spent(trained, events, clock.last),
        "digests": digests(events)[-MOST_DIGESTS // together :],
        "exact": config.get("exact") is True,
        "code": read_code(directory, DIFF_BYTES if together == 1 else 0),
        "commands": commands(starts[-1] if starts else {}),
        "files": files_of(directory)[: MOST_FILES // together],
        "log": log_tail(directory / "log.txt")[-LOG_LINES // together :],
    }
    room = max(0, room - len(escape(run)))
    scenes, left = read_scenes(directory, room * 4 // 5)
    drawn = {(scene["set"], scene["name"]) for scene in scenes}
    pictures = read_pictures(directory, left + room // 5, drawn)
    return run | {"scenes": scenes, "pictures": pictures}


class Elapsed:
    """Time since a run began, without the time in which it did not run."""

    def __init__(self, times: Sequence[np.ndarray], events: Sequence[Row]) -> None:
        known = np.concatenate([*times, [float(event["time"]) for event in events]])
        known = np.sort(known[np.isfinite(known)])
        starts = [event["time"] for event in events if event["event"] == "started"]
        self._origin = min([*starts[:1], *known[:1]], default=0.0)
        self._ends: list[float] = []  # of pauses, and how long they have lasted until then
        self._paused = [0.0]
        for start in starts[1:]:
            before = known[max(0, int(known.searchsorted(start)) - 1)]
            self._ends.append(start)
            self._paused.append(self._paused[-1] + max(0.0, start - before))
        self.last = self(known[-1]) if len(known) else 0.0

    def __call__(self, moment: float) -> float:
        paused = self._paused[bisect_right(self._ends, moment)]
        return round(float(max(0.0, moment - self._origin - paused)), 2)


def _add_times(curves: Payload, clock: Elapsed) -> Payload:
    times = curves.pop("time")
    return curves | {"seconds": [None if each is None else clock(each) for each in times]}


def read_status(directory: Path) -> Payload:
    """Reads status.json. A run that claims to be running but has been silent is `lost`."""
    status = read_row(directory / "status.json")
    told = {key: status.get(key) for key in ("state", "reason", "step", "time", "host")}
    beat = number(status.get("heartbeat"))
    if told["state"] == "running" and beat is not None:
        told["heartbeat"] = beat
        if not is_alive(status):
            told["state"] = LOST
    return told


def read_config(path: Path) -> Payload:
    """Reads the configuration that the run was started with; empty if it cannot be read."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_text(path)
        if not _is_flat(yaml.parse(text, loader)):
            return {}
        config = yaml.load(text, loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_flat(events: Iterable[Any]) -> bool:
    """Returns whether YAML has no aliases and no nesting that could overflow the C loader."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > DEEPEST or name == "AliasEvent":
            return False
    return True


def flatten(value: Any, path: str = "", depth: int = 12) -> dict[str, str]:
    """Returns every value of a configuration as text, by its path."""
    if isinstance(value, dict) and value and depth:
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= flatten(inner, f"{path}.{key}" if path else str(key), depth - 1)
        return flat
    words = {None: "null", True: "true", False: "false"}
    simple = value is None or isinstance(value, bool)
    return {path: words[value] if simple else str(value)[:300]} if path else {}


def read_events(directory: Path) -> list[Row]:
    """Returns the events of the run in their order, without damaged lines."""
    try:
        lines = read_bytes(directory / "events.jsonl", 1 << 28).splitlines()
    except (OSError, ValueError):
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_event(event):
            events.append(event)
    return events


def _is_event(row: Row) -> bool:
    types = isinstance(row.get("event"), str) and isinstance(row.get("step"), int)
    return types and number(row.get("time")) is not None


def _start(event: Row) -> Payload:
    keys = ("time", "step", "resumed", "ranks", "hosts", "device", "threads", "torch", "launcher")
    return {key: event.get(key) for key in keys}


def headline(table: Table, metric: str) -> Payload | None:
    """Returns the last and best value of the judging metric, with its interval if it has one."""
    name, lower = metric.removeprefix("-"), metric.startswith("-")
    known = table.known(name)
    if not known:
        return {"name": name, "lower": lower, "last": None} if name else None
    best = (min if lower else max)(known, key=lambda pair: pair[1])
    step, last = known[-1]
    interval = {key: dict(table.known(f"{name}_{key}")).get(step) for key in ("low", "high", "n")}
    ends = {"last": last, "step": step, "best": best[1], "best_step": best[0]}
    return {"name": name, "lower": lower, **ends, **interval}


def expectation(given: Any, table: Table, metric: str) -> Payload | None:
    """Returns the range in which the recipe expects a metric, and whether the run is on track; None
    if the recipe expects nothing.
    """
    if not isinstance(given, dict) or not isinstance(given.get("at"), dict):
        return None
    name = str(given.get("metric") or metric.removeprefix("-"))
    judged = name == metric.removeprefix("-")
    lower = metric.startswith("-") if judged else bool(COSTS.search(name))
    points: list[dict[str, Any]] = []
    for step, bounds in given["at"].items():
        ends = [number(end) for end in bounds] if isinstance(bounds, list) else []
        given_ends = [end for end in ends if end is not None]
        if str(step).isdecimal() and len(given_ends) == len(ends) == 2:
            points.append({"step": int(step), "low": min(given_ends), "high": max(given_ends)})
    points.sort(key=lambda point: point["step"])
    verdict, measured, known = "", None, table.known(name)
    for point in points:
        value = next((value for step, value in known if step >= point["step"]), None)
        if value is not None:
            fine = value <= point["high"] if lower else value >= point["low"]
            verdict, measured = "on track" if fine else "behind", point | {"value": value}
    return {"name": name, "points": points, "verdict": verdict, "measured": measured}


def marks(events: Sequence[Row], clock: Callable[[float], float], most: int) -> list[Payload]:
    """Returns the marks on the axes with their texts; only the last of a step's checkpoints."""
    written = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    drawn: list[Payload] = []
    ranks: Any = None
    for event in events:
        kind, text = _mark(event, ranks)
        if event["event"] == "started":
            ranks = event.get("ranks")
        if kind == "checkpoint" and event is not written[event["step"]]:
            continue
        if kind:
            place = {"step": event["step"], "seconds": clock(event["time"])}
            drawn.append({**place, "kind": kind, "text": text})
    if len(drawn) > most:
        drawn = [mark for mark in drawn if mark["kind"] != "checkpoint"]
    return drawn[-most:]


def _mark(event: Row, ranks: Any) -> tuple[str, str]:
    """Returns the kind of a mark and its text; empty for events without a mark."""
    step = f"step {event['step']:,}"
    match event["event"]:
        case "checkpoint":
            return "checkpoint", f"checkpoint, {step}"
        case "skipped":
            return "skipped", f"skipped {step}: {str(event.get('reason'))[:200]}"
        case "started" if event.get("resumed"):
            now = event.get("ranks")
            if ranks not in (None, now):
                return "ranks", f"restarted at {step}: {ranks} → {now} ranks"
            return "restart", f"restarted at {step}"
        case "ended" if event.get("state") in ("stopped", "requeue", "failed"):
            kind = "failed" if event["state"] == "failed" else "signal"
            return kind, f"{event['state']}, {step}: {str(event.get('reason'))[:200]}"
    return "", ""


def time_spent(table: Table, events: Sequence[Row], total: float) -> dict[str, float]:
    """Returns how many seconds went to each part of the steps, and to evaluations.

    A row logs the mean of the steps since the last row or evaluation, so the sum is an estimate,
    and may exceed the total time.
    """
    activities = {
        "data": "data_wait_ms",
        "all_reduce": "all_reduce_ms",
        "checkpoint": "checkpoint_ms",
    }
    names = {part: f"speed/{name}" for part, name in {"steps": "step_ms", **activities}.items()}
    counts = np.diff(table.steps, prepend=0)
    spent = {
        part: float(np.nansum(counts * table.column(name))) / 1e3 for part, name in names.items()
    }
    evaluated = [event for event in events if event["event"] == "evaluated"]
    spent["evaluation"] = sum(number(event.get("seconds")) or 0.0 for event in evaluated)
    steps_s = min(spent.pop("steps"), total - spent["evaluation"])
    spent["compute"] = max(0.0, steps_s - sum(spent[part] for part in activities))
    return {part: round(seconds, 3) for part, seconds in spent.items()}


def digests(events: Sequence[Row]) -> list[Payload]:
    """Returns the digest of each checkpoint, in the order of steps; the last one written counts."""
    checkpoints = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    steps = sorted(checkpoints)[-MOST_DIGESTS:]
    keys = ("step", "digest", "bytes", "time")
    return [{key: checkpoints[step].get(key) for key in keys} for step in steps]


def read_code(directory: Path, room: int = DIFF_BYTES) -> Payload:
    """Returns revision and branch, and the uncommitted changes as a diff and as lines by file."""
    code: Payload = {"changes": [], "diff": ""}
    for line in _lines(directory / "git.txt"):
        key, _, value = line.partition(": ")
        code[key] = value
    changes: dict[str, list[int]] = {}
    current: list[int] = [0, 0]
    diff = _lines(directory / "uncommitted.diff")
    text = "\n".join(diff)
    code |= {"diff": text[:room], "cut": len(text) > room}
    for line in diff:
        if line.startswith("diff --git "):
            current = changes.setdefault(line.rpartition(" b/")[2], [0, 0])
        elif line.startswith(LEFT_OUT):
            changes[line.removeprefix(LEFT_OUT)] = [0, 0]
        elif line[:1] in "+-" and line[:1] and line[:4] not in ("+++ ", "--- "):
            current[line[0] == "-"] += 1
    code["changes"] = [[name, *counts] for name, counts in list(changes.items())[:40]]
    return code


def commands(start: Mapping[str, Any]) -> Payload:
    """Returns the command that started the run, and so continues it, quoted for a shell."""
    import shlex

    arguments, ranks = start.get("arguments"), start.get("ranks")
    hosts = start.get("hosts")
    if not isinstance(arguments, list) or not isinstance(ranks, int):
        return {}
    given = " ".join(["pretrain.py", *(shlex.quote(str(each)) for each in arguments)])
    prefix = {
        "none": "python",
        "torchrun": f"torchrun --nproc-per-node {ranks}",
        "srun": f"srun --ntasks {ranks} python",
    }
    launcher = str(start.get("launcher"))
    if isinstance(hosts, list) and len(hosts) > 1 and ranks % len(hosts) == 0:
        each, meeting = ranks // len(hosts), shlex.quote(f"{hosts[0]}:29400")
        prefix["torchrun"] = (
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {each} --rdzv-backend c10d"
            f" --rdzv-endpoint {meeting}"
        )
    default = f"mpirun -n {ranks} python" if ranks > 1 else "python"
    return {"continue": f"{prefix.get(launcher, default)} {given}"}


def log_tail(path: Path) -> list[str]:
    """Returns the last lines of log.txt."""
    return [line[:400] for line in _lines(path)[-LOG_LINES:]]


def _lines(path: Path) -> list[str]:
    try:
        return read_bytes(path, 1 << 26).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []
