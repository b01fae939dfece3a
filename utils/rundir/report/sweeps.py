"""The table of a sweep, as its folder's summary.csv has it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.files import ROOT, read_text
from utils.rundir.report.reading import read_run

SUMMARY = "summary.csv"
OVERRIDE = re.compile(r"(?:^|\s)([+~]*[\w./@-]+)=")
MOST_CURVES = 12  # of the best jobs; more could not be told apart


def is_sweep(folder: Path) -> bool:
    """Returns whether the folder is that of a sweep, with its summary."""
    return (folder / SUMMARY).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """Returns what the page shows of a sweep."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(folder / SUMMARY))))
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{folder / SUMMARY}: cannot be read ({error})") from None
    jobs = [_job(row, number) for number, row in enumerate(rows, start=1)]
    metric = next((str(row["metric"]) for row in rows if row.get("metric")), "")
    lower = metric.startswith("-")
    keys = list(dict.fromkeys(key for job in jobs for key in job["keys"]))
    return {
        "name": folder.absolute().name,
        "directory": str(folder),
        "metric": metric.removeprefix("-"),
        "lower": lower,
        "keys": keys,
        "jobs": jobs,
        "runs": _best_runs(folder, jobs, lower),
    }


def _job(row: Mapping[str, str | None], number: int) -> dict[str, Any]:
    def value(name: str) -> float | None:
        try:
            return float(row.get(name) or "")
        except ValueError:
            return None

    return {
        "number": int(value("job") or number),
        "keys": overrides(row.get("overrides") or ""),
        "state": row.get("state") or "",
        "value": value("value"),
        "best": value("best"),
        "step": value("steps"),
        "seconds": value("seconds"),
        "directory": row.get("directory") or "",
    }


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
    ranked = [job for job in jobs if job["value"] is not None and job["directory"]]
    ranked.sort(key=lambda job: job["value"] if lower else -job["value"])
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
