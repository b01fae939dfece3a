"""The table of a sweep: its jobs, as the launcher lists them, with what their runs have logged."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from utils.files import ROOT, read_json, write_whole
from utils.rundir.records import read_config, read_metrics
from utils.rundir.status import state_of
from utils.sweep.seeds import Setting, difference

JOBS, TABLE, SUMMARY = "jobs.json", "jobs.csv", "summary.csv"
MOST_CURVES = 8  # of the best settings; more could not be told apart
COLUMNS = ("job", "overrides", "state", "metric", "value", "best", "steps", "seconds", "directory")
STATISTICS = ("n", "mean", "low", "high", "best", "worst")


class Job(TypedDict):
    """A job as the launcher lists it."""

    number: int
    overrides: dict[str, str]
    directory: str  # empty for a job that is refused


LISTED = TypeAdapter(list[Job])


@dataclass(frozen=True)
class Result:
    """The part of a run's log that sweeps compare."""

    state: str = ""
    metric: str = ""  # by which it is judged
    lower: bool = False
    value: float | None = None  # the last one
    best: float | None = None
    step: int | None = None
    seconds: float | None = None  # of training, in all its starts


def result(directory: Path, metric: str = "") -> Result:
    """Returns the result in a run directory, by its own metric if none is given; empty if it has
    none.
    """
    own = str(read_config(directory).get("objective_metric") or "")
    if not own:
        return Result(state_of(directory))
    metric = metric or own
    tables, name, lower = read_metrics(directory), metric.removeprefix("-"), metric.startswith("-")
    values = [value for table in tables.values() for value in table.by_step(name).values()]
    steps = [int(table.steps[-1]) for table in tables.values() if len(table.steps)]
    return Result(
        state_of(directory),
        name,
        lower,
        values[-1] if values else None,
        (min if lower else max)(values, default=None),
        max(steps, default=None),
        round(tables["train"].seconds_of("step"), 1),
    )


def is_sweep(folder: Path) -> bool:
    return (folder / JOBS).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """Returns what the page shows of a sweep: its jobs and settings, the best first."""
    jobs, metric, lower = _jobs(folder)
    settings = _settings(jobs, lower)
    return {
        "name": folder.absolute().name,
        "directory": str(folder),
        "metric": metric,
        "lower": lower,
        "keys": list(dict.fromkeys(key for job in jobs for key in job["keys"])),
        "jobs": jobs,
        "settings": settings,
        "difference": _difference(settings, metric),
    }


def write_table(folder: Path) -> str:
    """Writes a row for each job to jobs.csv, and one for each setting to summary.csv. Returns them
    as text, best first.
    """
    jobs, metric, lower = _jobs(folder)
    settings = _settings(jobs, lower)
    by_number = sorted(jobs, key=lambda job: job["number"])
    rows = [
        [job["number"], title(job["keys"]), job["state"], metric]
        + [job[key] for key in ("value", "best", "step", "seconds", "directory")]
        for job in by_number
    ]
    _write_csv(folder / TABLE, [COLUMNS, *rows])
    rows = []
    for setting in settings:
        numbers = [setting[name] for name in STATISTICS]
        of_jobs = " ".join(map(str, setting["jobs"]))
        rows.append([title(setting["keys"]), metric, *numbers, of_jobs])
    _write_csv(folder / SUMMARY, [("overrides", "metric", *STATISTICS, "jobs"), *rows])

    lines = [f"{'job':>4}  {'state':<9} {'value':>11}  overrides"]
    for job in jobs:
        lines.append(
            f"{job['number']:>4}  {job['state']:<9} {_shown(job['value'])}  {title(job['keys'])}"
        )
    if any(len(setting["jobs"]) > 1 for setting in settings):
        names = "".join(f" {name:>11}" for name in STATISTICS[1:])
        lines += ["", f"over seeds, {metric}, 95 % interval by t:", f"{'n':>4}{names}  overrides"]
        for setting in settings:
            shown = " ".join(_shown(setting[name]) for name in STATISTICS[1:])
            lines.append(f"{setting['n']:>4} {shown}  {title(setting['keys'])}")
        lines += filter(None, [_difference(settings, metric)])
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return f"{'' if value is None else f'{value:.6g}':>11}"


def _write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(path, text.getvalue())


def title(keys: Mapping[str, str]) -> str:
    """Returns the overrides in which a job or setting differs from others."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def runs_of(folder: Path, sweep: Mapping[str, Any]) -> list[tuple[str, list[Path]]]:
    """Returns the settings of a sweep, the best first, by their titles, with the directories of
    their runs that have a value.
    """
    bases = (Path(), ROOT, folder, *folder.absolute().parents)  # also of a copy elsewhere
    jobs = {job["number"]: job for job in sweep["jobs"] if job["value"] is not None}
    found = []
    for setting in sweep["settings"]:
        directories = []
        for number in setting["jobs"]:
            places = [base / jobs[number]["directory"] for base in bases] if number in jobs else []
            directories += [place for place in places if place.is_dir()][:1]
        numbers = ", ".join(map(str, setting["jobs"]))
        if directories:
            found.append((f"{numbers}: {title(setting['keys'])}".rstrip(": "), directories))
    return found


def _settings(jobs: Sequence[dict[str, Any]], lower: bool) -> list[dict[str, Any]]:
    """Returns the statistics of jobs that differ in `seed` alone; the best first, and those without
    a value last. If some jobs have finished, only those count.
    """
    counted = [job for job in jobs if job["state"] == "finished"] or jobs
    known = {job["number"]: job["value"] for job in counted if job["value"] is not None}
    groups: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        groups.setdefault(title({**job["keys"], "seed": ""}), []).append(job)
    settings: list[dict[str, Any]] = []
    for group in groups.values():
        keys = {key: value for key, value in group[0]["keys"].items() if key != "seed"}
        keys = group[0]["keys"] if len(group) == 1 else keys
        numbers = sorted(job["number"] for job in group)
        values = {
            str(job["keys"].get("seed")): job["value"] for job in group if job["number"] in known
        }
        found = Setting(title(keys) or "all", values, lower).summary()
        settings.append({"keys": keys, "jobs": numbers, "values": values, **found})
    sign = 1 if lower else -1
    settings.sort(key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0.0)))
    return settings


def _difference(settings: Sequence[dict[str, Any]], metric: str) -> str:
    """Compares the settings in a sentence, if there are two of several seeds."""
    if len(settings) != 2:
        return ""
    one, other = (Setting(title(row["keys"]), row["values"]) for row in settings)
    return difference(one, other, metric)


def _jobs(folder: Path) -> tuple[list[dict[str, Any]], str, bool]:
    """Returns the jobs, best first and those without a value last, their metric, and whether the
    lower is the better.
    """
    remedy = "the sweep that wrote it writes it again"
    jobs: list[dict[str, Any]] = [dict(job) for job in read_json(folder / JOBS, LISTED, remedy)]
    all_keys = {key for job in jobs for key in job["overrides"]}
    differing = {
        key for key in all_keys if len({job["overrides"].get(key) for job in jobs}) > 1
    } or all_keys
    judged = Result()
    for job in jobs:
        overrides = job.pop("overrides")
        job["keys"] = {key: value for key, value in overrides.items() if key in differing}
        found = Result("failed")  # a job that is refused has no directory
        if job["directory"]:
            directory = Path(job["directory"])
            # one table has one metric, even if the jobs are judged by several
            found = result(directory, "-" * judged.lower + judged.metric)
        job |= {"state": found.state or "waiting", "value": found.value, "best": found.best}
        job |= {"step": found.step, "seconds": found.seconds}
        judged = judged if judged.metric else found
    sign = 1 if judged.lower else -1
    jobs.sort(key=lambda job: (job["value"] is None, sign * (job["value"] or 0.0)))
    return jobs, judged.metric, judged.lower
