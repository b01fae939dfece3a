"""The table of a sweep: its jobs, as the launcher lists them, with what their runs have logged."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.errors import ConfigError
from utils.files import ROOT, read_text, write_whole
from utils.report.reading import read_run
from utils.report.rows import read_rows
from utils.rundir.status import state_of

JOBS, SUMMARY = "jobs.json", "summary.csv"
OVERRIDE = re.compile(r"(?:^|\s)([+~]*[\w./@-]+)=")
MOST_CURVES = 12  # of the best jobs; more could not be told apart
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
    try:
        config = yaml.safe_load(read_text(directory / "config.yaml"))
        metric = str(config.get("objective_metric") or "")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return Result()
    rows, lower = read_rows(directory / "metrics.jsonl"), metric.startswith("-")
    name = metric.removeprefix("-")
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    best = (min if lower else max)(values) if values else None
    seconds, before = 0.0, 0
    for row in rows:
        if "speed/step_ms" in row:
            seconds += row["speed/step_ms"] / 1000 * (row["step"] - before)
            before = row["step"]
    step = rows[-1]["step"] if rows else None
    return Result(name, lower, values[-1] if values else None, best, step, round(seconds, 1))


def is_sweep(folder: Path) -> bool:
    """Returns whether the folder is that of a sweep."""
    return (folder / JOBS).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """Returns what the page shows of a sweep."""
    jobs = _jobs(folder)
    known = next((job["result"] for job in jobs if job["result"].metric), Result())
    return {
        "name": folder.absolute().name,
        "directory": str(folder),
        "metric": known.metric,
        "lower": known.lower,
        "keys": list(dict.fromkeys(key for job in jobs for key in job["keys"])),
        "jobs": [{key: value for key, value in job.items() if key != "result"} for job in jobs],
        "runs": _best_runs(folder, jobs, known.lower),
    }


def replace(path: Path, content: str) -> None:
    """Replaces a file that several tasks of a job array write."""
    aside = path.with_name(f".{socket.gethostname()}-{os.getpid()}-{path.name}")
    write_whole(aside, content)
    os.replace(aside, path)


def write_table(folder: Path) -> str:
    """Writes summary.csv, and returns the table as text, best first."""
    jobs = _jobs(folder)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for job in jobs:
        about = " ".join(f"{key}={value}" for key, value in job["keys"].items())
        ends = [job[key] for key in ("value", "best", "step", "seconds", "directory")]
        rows.writerow([job["number"], about, job["state"], job["result"].metric, *ends])
    replace(folder / SUMMARY, text.getvalue())
    lower = any(job["result"].lower for job in jobs)
    lines = [f"{'job':>4}  {'state':<9} {'value':>11}  overrides"]
    for best in _ranked(jobs, lower):
        job = dict(best)
        value = "" if job["value"] is None else f"{job['value']:.6g}"
        about = " ".join(f"{key}={value}" for key, value in job["keys"].items())
        lines.append(f"{job['number']:>4}  {job['state']:<9} {value:>11}  {about}")
    return "\n".join(lines)


def _jobs(folder: Path) -> list[dict[str, Any]]:
    try:
        listed = json.loads(read_text(folder / JOBS))
        jobs = [_job(each) for each in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / JOBS}: cannot be read ({error})") from None
    every = {key for job in jobs for key in job["keys"]}
    vary = {key for key in every if len({job["keys"].get(key) for job in jobs}) > 1}
    for job in jobs if vary else ():
        job["keys"] = {key: value for key, value in job["keys"].items() if key in vary}
    return jobs


def _job(listed: Mapping[str, Any]) -> dict[str, Any]:
    directory = str(listed["directory"])
    found = result(Path(directory)) if directory else Result()
    state = state_of(Path(directory)) if directory else "failed"
    return {
        "number": int(listed["number"]),
        "keys": overrides(str(listed["overrides"])),
        "state": state or "waiting",
        "value": found.value,
        "best": found.best,
        "step": found.step,
        "seconds": found.seconds,
        "directory": directory,
        "result": found,
    }


def _ranked(jobs: Sequence[Mapping[str, Any]], lower: bool) -> list[Mapping[str, Any]]:
    """Returns the jobs with the best first, and those without a value last."""

    def cost(job: Mapping[str, Any]) -> tuple[bool, float]:
        value = job["value"]
        return value is None, 0.0 if value is None else value if lower else -value

    return sorted(jobs, key=cost)


def overrides(text: str) -> dict[str, str]:
    """Splits `lr=1e-3 arch=trm` into keys and values; a value may hold spaces."""
    matches = list(OVERRIDE.finditer(text))
    ends = [each.start() for each in matches[1:]] + [len(text)]
    return {
        each[1].lstrip("+~"): text[each.end() : end].strip()
        for each, end in zip(matches, ends, strict=True)
    }


def _best_runs(folder: Path, jobs: Sequence[Mapping[str, Any]], lower: bool) -> list[Any]:
    """Returns the runs of the best jobs whose directories still exist."""
    ranked = [job for job in _ranked(jobs, lower) if job["value"] is not None]
    runs = []
    for job in ranked[:MOST_CURVES]:
        bases = (Path(), ROOT, folder, *folder.absolute().parents)  # also of a copy elsewhere
        places = [base / job["directory"] for base in bases]
        directory = next((place for place in places if place.is_dir()), None)
        if directory is not None:
            run = read_run(directory, room=0, together=MOST_CURVES)
            keys = " ".join(f"{key}={value}" for key, value in job["keys"].items())
            run |= {"name": f"{job['number']}: {keys}" if keys else str(job["number"])}
            runs.append(run | {"config": {}, "log": [], "files": [], "marks": []})
    return runs
