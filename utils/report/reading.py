"""Reads what the page shows of a run directory. A file that is missing or damaged leaves a gap."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import read_bytes, read_row
from utils.report.charts import curves, unit
from utils.report.evaluations import STEP, evaluated_sets, read_evaluations
from utils.report.page import escape
from utils.rundir.records import Table, number, read_config, read_events
from utils.rundir.status import FILE, state_of

Payload = dict[str, Any]
COSTS = re.compile(r"loss|bpb|error|perplexity")  # metrics where lower is better
CURVES_BYTES, POINT_BYTES = 150_000, 24  # for all curves; of a point with its extremes
MOST_POINTS, LEAST_POINTS = 500, 20
MOST_EVENTS, MOST_MARKS, MOST_DIGESTS, MOST_FILES, MOST_KEYS, LOG_LINES = (
    400,
    100,
    200,
    60,
    1000,
    30,
)


def read_run(
    directory: Path, tables: Mapping[str, Table], room: int = 300_000, together: int = 1
) -> Payload:
    """Returns what the page shows of one run with these metrics, with scenes and pictures as far as
    all of it fits in `room` bytes. Of each of several runs shown `together` it returns less.
    """
    events = read_events(directory)
    config = read_config(directory)
    starts = [event for event in events if event["event"] == "started"]
    status = read_row(directory / FILE)
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
        "config": dict(islice(flatten(config), MOST_KEYS)),
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
    found = read_evaluations(directory, max(0, room - len(escape(run))))
    return run | found | {"files": found["files"][: MOST_FILES // together]}


def sets_of(directory: Path) -> set[str]:
    """Returns the names of the sets that have been evaluated."""
    return {folder.name for _, folder in evaluated_sets(directory)}


class Elapsed:
    """Time since a run began, without the time in which it did not run."""

    def __init__(self, tables: Mapping[str, Table], events: Sequence[Payload]) -> None:
        times = [table.column("time") for table in tables.values()]
        known = np.sort(np.concatenate([*times, [float(event["time"]) for event in events]]))
        known = known[np.isfinite(known)]
        starts = [event["time"] for event in events if event["event"] == "started"]
        self._origin = min([*starts[:1], *known[:1]], default=0.0)
        self._ends = starts[1:]  # of pauses, and how long they have lasted until then
        self._paused = [0.0]
        for start in self._ends:
            before = known[max(0, int(known.searchsorted(start)) - 1)]
            self._paused.append(self._paused[-1] + max(0.0, start - before))
        self.last = (self(known[-1]) or 0.0) if len(known) else 0.0

    def __call__(self, moment: float) -> float | None:
        if np.isnan(moment):
            return None
        paused = self._paused[bisect_right(self._ends, moment)]
        return round(float(max(0.0, moment - self._origin - paused)), 2)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields every value of a configuration as text, by its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif path:
        simple = value is None or isinstance(value, bool)
        yield path, "null" if value is None else str(value).lower() if simple else str(value)[:300]


def headline(table: Table, metric: str) -> Payload | None:
    """Returns the last and best value of the judging metric, with its interval if it has one."""
    name, lower = metric.removeprefix("-"), metric.startswith("-")
    if not name:
        return None
    told = {"name": name, "unit": unit(name), "lower": lower, "last": None}
    if not (known := table.known(name)):
        return told
    step, best = max(known), (min if lower else max)(known, key=lambda step: known[step])
    interval = {key: table.known(f"{name}_{key}").get(step) for key in ("low", "high", "n")}
    ends = {"last": known[step], "step": step, "best": known[best], "best_step": best}
    return told | ends | interval


def expectation(given: Any, table: Table, metric: str) -> Payload | None:
    """Returns the range in which the recipe expects a metric, and whether the run is on track; None
    if the recipe expects nothing.
    """
    if not isinstance(given, dict) or not isinstance(given.get("at"), dict):
        return None
    name = str(given.get("metric") or metric.removeprefix("-"))
    judged = name == metric.removeprefix("-")
    lower = metric.startswith("-") if judged else bool(COSTS.search(name))
    points: list[Payload] = []
    for step, bounds in given["at"].items():
        ends = [number(end) for end in bounds] if isinstance(bounds, list) else []
        low_high = sorted(end for end in ends if end is not None)
        if str(step).isdecimal() and len(low_high) == 2:
            points.append({"step": int(step), "low": low_high[0], "high": low_high[1]})
    points.sort(key=lambda point: point["step"])
    verdict, measured = "", None
    for point in points:
        later = {step: value for step, value in table.known(name).items() if step >= point["step"]}
        if later:
            value = later[min(later)]
            fine = value <= point["high"] if lower else value >= point["low"]
            verdict, measured = "on track" if fine else "behind", point
    told = {"name": name, "unit": unit(name), "points": points}
    return told | {"verdict": verdict, "measured": measured}


def median_speed(table: Table) -> Payload:
    """Returns the median of each speed, null where none was logged."""
    names = ("examples_per_s", "tokens_per_s", "step_ms")
    known = {name: list(table.known(f"speed/{name}").values()) for name in names}
    return {name: float(np.median(values)) if values else None for name, values in known.items()}


def timeline(events: Sequence[Payload], clock: Elapsed) -> list[Payload]:
    """Returns what happened to the run, with its last checkpoints; of one step only the last."""
    written = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    last = [written[step] for step in sorted(written)[-MOST_MARKS:]]
    marked = {id(event) for event in last}
    told, ranks = [], None
    for event in events:
        if event["event"] == "checkpoint" and id(event) not in marked:
            continue
        kind, text = _describe(event, ranks)
        if event["event"] == "started":
            ranks = event.get("ranks")
        if kind:
            place = {"step": event["step"], "time": event["time"], "seconds": clock(event["time"])}
            told.append({**place, "kind": kind, "text": text})
    return told


def _describe(event: Payload, ranks: Any) -> tuple[str, str]:
    """Returns the kind of an event and its text; empty for events that are not shown."""
    reason = str(event.get("reason") or "")[:200]
    match event["event"]:
        case "checkpoint":
            return "checkpoint", "checkpoint"
        case "skipped":
            return "skipped", f"skipped: {reason}"
        case "started":
            now, hosts = event.get("ranks"), event.get("hosts")
            where = ", ".join(map(str, hosts)) if isinstance(hosts, list) else "?"
            machine = f"{where}, {event.get('device')}, PyTorch {event.get('torch')}"
            count = f"{now} rank{'s' * (now != 1)} ({machine})"
            if not event.get("resumed"):
                return "started", f"started on {count}"
            if ranks in (None, now):
                return "restart", f"restarted on {count}"
            return "ranks", f"restarted on {count}, before on {ranks}"
        case "ended":
            state = str(event.get("state"))
            kinds = {"failed": "failed", "finished": "finished"}
            return kinds.get(state, "signal"), f"{state}: {reason}" if reason else state
    return "", ""


def time_spent(table: Table, events: Sequence[Payload], total: float) -> dict[str, float]:
    """Returns how many seconds went to each part of the steps, and to evaluations.

    A row logs the mean of the steps since the row before, so the sums are estimates, and may exceed
    the total time.
    """
    spent = {part: table.seconds_of(part) for part in ("data_wait", "all_reduce", "checkpoint")}
    evaluated = [event for event in events if event["event"] == "evaluated"]
    evaluation = sum(number(event.get("seconds")) or 0.0 for event in evaluated)
    compute = min(table.seconds_of("step"), total - evaluation) - sum(spent.values())
    spent |= {"compute": max(0.0, compute), "evaluation": evaluation}
    return {part: round(seconds, 3) for part, seconds in spent.items()}


def checkpoint_steps(directory: Path) -> set[int]:
    """Returns the steps whose checkpoints are in the run directory."""
    names = [folder.name for folder in directory.glob("checkpoints/step_*/")]
    return {int(named[1]) for name in names if (named := STEP.fullmatch(name))}


def digests(directory: Path, events: Sequence[Payload]) -> list[Payload]:
    """Returns the digest of each checkpoint by step, and whether the checkpoint is still there; the
    last one written counts.
    """
    checkpoints = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    there = checkpoint_steps(directory)
    keys = ("step", "digest", "bytes", "time")
    return [
        {**{key: checkpoints[step].get(key) for key in keys}, "gone": step not in there}
        for step in sorted(checkpoints)
    ]


def read_code(directory: Path) -> Payload:
    """Returns revision and branch, and whether there were changes that are not committed."""
    code = dict(line.split(": ", 1) for line in _lines(directory / "git.txt") if ": " in line)
    return {
        "revision": code.get("revision", ""),
        "branch": code.get("branch", ""),
        "changed": code.get("uncommitted changes") == "yes",
    }


def command(start: Payload) -> str:
    """Returns the command that started the run, and so continues it, quoted for a shell."""
    arguments, ranks, hosts = start.get("arguments"), start.get("ranks"), start.get("hosts")
    if not isinstance(arguments, list) or not isinstance(ranks, int):
        return ""
    torchrun = f"torchrun --nproc-per-node {ranks}"
    if isinstance(hosts, list) and len(hosts) > 1 and ranks % len(hosts) == 0:
        each, meeting = ranks // len(hosts), shlex.quote(f"{hosts[0]}:29400")
        torchrun = (
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {each} --rdzv-backend c10d"
            f" --rdzv-endpoint {meeting}"
        )
    prefixes = {"none": "python", "torchrun": torchrun, "srun": f"srun --ntasks {ranks} python"}
    default = f"mpirun -n {ranks} python" if ranks > 1 else "python"
    prefix = prefixes.get(str(start.get("launcher")), default)
    return " ".join([prefix, "pretrain.py", *(shlex.quote(str(each)) for each in arguments)])


def _lines(path: Path) -> list[str]:
    try:
        return [
            line[:400] for line in read_bytes(path, 1 << 26).decode(errors="replace").splitlines()
        ]
    except (OSError, ValueError):
        return []
