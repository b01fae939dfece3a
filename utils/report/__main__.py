"""`python -m utils.report RUN [RUN …]`: draws the report page of a run, compares several runs or
two settings of several seeds each, or shows a sweep.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from utils.errors import ConfigError, brief, exit_status
from utils.files import write_whole
from utils.report.charts import charts_of, speed_charts, unit
from utils.report.groups import by_setting, over_seeds, told_apart
from utils.report.page import render
from utils.report.reading import evaluated_sets, read_run
from utils.rundir.folders import is_run
from utils.rundir.maker import REPORT_FILE
from utils.rundir.records import read_metrics
from utils.sweep.table import MOST_CURVES, is_sweep, read_sweep, runs_of

LONGEST_S = 120  # to draw a page while its run goes on
MOST_RUNS = 16  # or settings
MOST_COMPARED = 6  # runs that are compared tensor by tensor


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.report",
        description="Draws report.html of a run, compares runs, or shows a sweep.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run or a sweep")
    parser.add_argument("--output", metavar="FILE", help="where the page goes")
    # how a run draws its own page while it goes on
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    directories = [Path(run) for run in options.runs]
    if options.beside:
        return beside(directories[0])
    return exit_status(lambda: draw(directories, options.output))


def beside(directory: Path) -> int:
    """Draws the page of a run that goes on: at low priority, and ignoring signals, which the run
    obeys.
    """
    os.nice(19)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.alarm(LONGEST_S)
    try:
        draw([directory], None)
    except Exception as error:
        print(f"{type(error).__name__}: {brief(error)}", file=sys.stderr)
        return 1
    return 0


def draw(directories: list[Path], output: str | None) -> str:
    """Writes the page; returns where it is, and how runs compare with the first."""
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such folder; give the directory of a run")
    if not output and not (is_run(directories[0]) or is_sweep(directories[0])):
        raise ConfigError(
            f"{directories[0]}: no run has begun there; give the directory of a run or a sweep, or"
            " --output FILE"
        )
    payload = read(directories)
    names = [run["name"] for run in payload["runs"]]
    heading = payload["sweep"]["name"] if payload["sweep"] else " · ".join(names)
    name = REPORT_FILE if len(directories) == 1 else "comparison.html"
    path = Path(output) if output else directories[0] / name
    try:
        write_whole(path, render(payload, heading))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({brief(error)}); give another place with --output"
        ) from None
    compared = [run for run in payload["runs"] if "comparison" in run]
    lines = [run["comparison"]["text"] for run in compared]
    if len(compared) > 1:
        lines = [f"{run['name']}: {line}" for run, line in zip(compared, lines, strict=True)]
    lines += filter(None, [payload["difference"]])
    return "\n".join([*lines, f"report: {path}"])


def read(directories: list[Path]) -> dict[str, Any]:
    """Reads what the page shows: a sweep, one run, or several; of each setting the means over its
    seeds.
    """
    sweep, told, together = None, "", MOST_CURVES
    if len(directories) == 1 and is_sweep(directories[0]):
        sweep = read_sweep(directories[0])
        sweep["unit"], told = unit(sweep["metric"]), sweep["difference"]
        groups = runs_of(directories[0], sweep)[:MOST_CURVES]
    else:
        groups = by_setting(directories)
        together = len(groups)
        if together > MOST_RUNS:
            raise ConfigError(f"{together} runs: give at most {MOST_RUNS}")
        told = told_apart(groups)
    tables, runs = [], []
    for name, of_group in groups:
        metrics = [read_metrics(directory) for directory in of_group]
        found = [
            read_run(directory, table, together)
            for directory, table in zip(of_group, metrics, strict=True)
        ]
        tables += metrics
        runs.append(over_seeds(found) if len(found) > 1 else found[0])
        runs[-1]["name"] = name or runs[-1]["name"]
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = f"{run['name']} ({run['directory']})"
    all_runs = [directory for _, of_group in groups for directory in of_group]
    if not sweep and 2 <= len(runs) == len(all_runs) <= MOST_COMPARED:
        from utils.report.same import compare  # imports torch

        for run, directory in zip(runs[1:], all_runs[1:], strict=True):
            run["comparison"] = compare(all_runs[0], directory)
    sets = {folder.name for directory in all_runs for _, folder in evaluated_sets(directory)}
    judged = (runs[0]["headline"] or {}).get("name", "") if runs else ""
    charts = {"curves": charts_of(tables, sets, judged), "speed": speed_charts(tables)}
    page = {"made": time.time(), "runs": runs, "sweep": sweep, "charts": charts}
    return page | {"difference": told}


if __name__ == "__main__":
    gc.disable()  # it would look through all rows, again and again, and find nothing to free
    sys.exit(main(sys.argv[1:]))
