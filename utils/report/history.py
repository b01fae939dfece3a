"""What happened to a run, from its events: starts, ends, checkpoints, and where the time went."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.checkpoint.folders import steps_in
from utils.rundir.records import MetricTable, finite

Event = Mapping[str, Any]  # a line of events.jsonl
MOST_MARKS = 100  # checkpoints in a timeline


class Elapsed:
    """Time since a run began, without the time in which it did not run."""

    def __init__(self, tables: Mapping[str, MetricTable], events: Sequence[Event]) -> None:
        logged = [table.column("time") for table in tables.values()]
        times = np.sort(np.concatenate([*logged, [float(event["time"]) for event in events]]))
        times = times[np.isfinite(times)]
        starts = [event["time"] for event in events if event["event"] == "started"]
        self._origin = min([*starts[:1], *times[:1]], default=0.0)
        # When each pause ended, and how long all pauses until then have lasted. A pause begins with
        # the last sign of life before a start: a killed run does not say when it died.
        self._ends = starts[1:]
        self._paused = [0.0]
        for start in self._ends:
            before = times[max(0, int(times.searchsorted(start)) - 1)]
            self._paused.append(self._paused[-1] + max(0.0, start - before))
        self.last = (self(times[-1]) or 0.0) if len(times) else 0.0

    def __call__(self, moment: float) -> float | None:
        if np.isnan(moment):
            return None
        paused = self._paused[bisect_right(self._ends, moment)]
        return round(float(max(0.0, moment - self._origin - paused)), 2)


def timeline(events: Sequence[Event], clock: Elapsed) -> list[dict[str, Any]]:
    """Returns what happened to the run, with its last checkpoints; of one step only the last."""
    checkpoints = _checkpoints(events)
    marked = {id(checkpoints[step]) for step in sorted(checkpoints)[-MOST_MARKS:]}
    rows, ranks = [], None
    for event in events:
        if event["event"] == "checkpoint" and id(event) not in marked:
            continue
        kind, text = _describe(event, ranks)
        if event["event"] == "started":
            ranks = event.get("ranks")
        if kind:
            place = {"step": event["step"], "time": event["time"], "seconds": clock(event["time"])}
            rows.append({**place, "kind": kind, "text": text})
    return rows


def _checkpoints(events: Sequence[Event]) -> dict[int, Event]:
    """Returns by step the event of its checkpoint, the last one if it was written again."""
    return {event["step"]: event for event in events if event["event"] == "checkpoint"}


def _describe(event: Event, ranks: Any) -> tuple[str, str]:
    """Returns the kind of an event and its text; empty for events that are not shown. `ranks` are
    those of the start before.
    """
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
            kind = state if state in ("failed", "finished") else "signal"
            return kind, f"{state}: {reason}" if reason else state
    return "", ""


def time_spent(table: MetricTable, events: Sequence[Event], total: float) -> dict[str, float]:
    """Returns how many seconds went to each part of the steps, and to evaluations.

    A row logs the mean of the steps since the row before, so the sums are estimates, and may exceed
    the total time.
    """
    spent = {part: table.seconds_of(part) for part in ("data_wait", "all_reduce", "checkpoint")}
    evaluated = [event for event in events if event["event"] == "evaluated"]
    evaluation = sum(finite(event.get("seconds")) or 0.0 for event in evaluated)
    compute = min(table.seconds_of("step"), total - evaluation) - sum(spent.values())
    spent |= {"compute": max(0.0, compute), "evaluation": evaluation}
    return {part: round(seconds, 3) for part, seconds in spent.items()}


def digests(directory: Path, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns the digest of each checkpoint by step, and whether the checkpoint is still there."""
    checkpoints, kept = _checkpoints(events), steps_in(directory / "checkpoints")
    keys = ("step", "digest", "bytes", "time")
    return [
        {**{key: checkpoints[step].get(key) for key in keys}, "gone": step not in kept}
        for step in sorted(checkpoints)
    ]


def command(start: Event) -> str:
    """Returns the command that started the run, and so continues it, quoted for a shell."""
    arguments, ranks, hosts = start.get("arguments"), start.get("ranks"), start.get("hosts")
    if not isinstance(arguments, list) or not isinstance(ranks, int):
        return ""
    torchrun = f"torchrun --nproc-per-node {ranks}"
    if isinstance(hosts, list) and len(hosts) > 1 and ranks % len(hosts) == 0:
        torchrun = (
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {ranks // len(hosts)}"
            f" --rdzv-backend c10d --rdzv-endpoint {shlex.quote(f'{hosts[0]}:29400')}"
        )
    prefixes = {"none": "python", "torchrun": torchrun, "srun": f"srun --ntasks {ranks} python"}
    mpirun = f"mpirun -n {ranks} python" if ranks > 1 else "python"
    prefix = prefixes.get(str(start.get("launcher")), mpirun)
    return " ".join([prefix, "pretrain.py", *(shlex.quote(str(word)) for word in arguments)])
