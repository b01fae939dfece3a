"""The table of a sweep: its jobs, as the launcher lists them, with what their runs have logged."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.files import ROOT, read_text, write_whole
from utils.rundir.records import read_config, read_metrics
from utils.rundir.status import state_of

JOBS, SUMMARY = "jobs.json", "summary.csv"
MOST_CURVES = 8  # of the best jobs; more could not be told apart
COLUMNS = ("job", "overrides", "state", "metric", "value", "best", "steps", "seconds", "directory")


@dataclass(frozen=True)
class Result:
    """What one run has logged, as far as sweeps compare it."""

    metric: str = ""  # by which it is judged
    lower: bool = False
    value: float | None = None  # the last one
    best: float | None = None
    step: int | None = None
    seconds: float | None = None  # of training, in all its starts


def result(directory: Path) -> Result:
    """Returns the result in a run directory; empty if it has none."""
    metric = str(read_config(directory).get("objective_metric") or "")
    if not metric:
        return Result()
    tables, name, lower = read_metrics(directory), metric.removeprefix("-"), metric.startswith("-")
    values = [value for table in tables.values() for value in table.by_step(name).values()]
    steps = [int(table.steps[-1]) for table in tables.values() if len(table.steps)]
    return Result(
        name,
        lower,
        values[-1] if values else None,
        (min if lower else max)(values, default=None),
        max(steps, default=None),
        round(tables["train"].seconds_of("step"), 1),
    )


def is_sweep(folder: Path) -> bool:
    """Returns whether the folder is that of a sweep."""
    return (folder / JOBS).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """Returns what the page shows of a sweep: its jobs, the best first."""
    jobs, metric, lower = _jobs(folder)
    return {
        "name": folder.absolute().name,
        "directory": str(folder),
        "metric": metric,
        "lower": lower,
        "keys": list(dict.fromkeys(key for job in jobs for key in job["keys"])),
        "jobs": jobs,
    }


def write_table(folder: Path) -> str:
    """Writes summary.csv, and returns the table as text, best first."""
    jobs, metric, _ = _jobs(folder)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    lines = [f"{'job':>4}  {'state':<9} {'value':>11}  overrides"]
    for job in sorted(jobs, key=lambda job: job["number"]):
        ends = [job[key] for key in ("value", "best", "step", "seconds", "directory")]
        rows.writerow([job["number"], title(job), job["state"], metric, *ends])
    for job in jobs:
        value = "" if job["value"] is None else f"{job['value']:.6g}"
        lines.append(f"{job['number']:>4}  {job['state']:<9} {value:>11}  {title(job)}")
    write_whole(folder / SUMMARY, text.getvalue())
    return "\n".join(lines)


def title(job: dict[str, Any]) -> str:
    """Returns the overrides in which the job differs from others."""
    return " ".join(f"{key}={value}" for key, value in job["keys"].items())


def best_runs(folder: Path, jobs: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Path]]:
    """Returns the best jobs and the directories of their runs, as far as these exist."""
    bases = (Path(), ROOT, folder, *folder.absolute().parents)  # also of a copy elsewhere
    found = []
    for job in jobs:
        places = [base / job["directory"] for base in bases]
        directory = next((place for place in places if place.is_dir()), None)
        if job["value"] is not None and directory:
            found.append((job, directory))
    return found[:MOST_CURVES]


def _jobs(folder: Path) -> tuple[list[dict[str, Any]], str, bool]:
    """Returns the jobs, best first and those without a value last, their metric, and whether the
    lower is the better.
    """
    jobs = json.loads(read_text(folder / JOBS))
    all_keys = {key for job in jobs for key in job["overrides"]}
    differing = {
        key for key in all_keys if len({job["overrides"].get(key) for job in jobs}) > 1
    } or all_keys
    judged = Result()
    for job in jobs:
        overrides = job.pop("overrides")
        job["keys"] = {key: value for key, value in overrides.items() if key in differing}
        found, state = Result(), "failed"  # a job that is refused has no directory
        if job["directory"]:
            directory = Path(job["directory"])
            found, state = result(directory), state_of(directory) or "waiting"
        job |= {"state": state, "value": found.value, "best": found.best}
        job |= {"step": found.step, "seconds": found.seconds}
        judged = judged if judged.metric else found
    sign = 1 if judged.lower else -1
    jobs.sort(key=lambda job: (job["value"] is None, sign * (job["value"] or 0.0)))
    return jobs, judged.metric, judged.lower
