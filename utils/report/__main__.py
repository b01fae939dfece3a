"""`python -m utils.report RUN [RUN …]`: draws the report page of a run, compares several,
or shows a sweep.
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
from utils.report.page import render, shell_bytes
from utils.report.reading import read_run
from utils.report.same import compare
from utils.report.sweeps import is_sweep, read_sweep
from utils.rundir.maker import FILE

LONGEST_S = 120  # to draw a page while its run goes on
MOST_BYTES = 500_000  # of a page
REST_BYTES = 1_000  # of it, for all but the runs
POINTS = 500
MOST_RUNS = 16
MOST_COMPARED = 6  # runs that are compared tensor by tensor


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.report",
        description="Draws report.html of a run, compares runs, or shows a sweep.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the directory of a run, or of one sweep"
    )
    parser.add_argument("--output", metavar="FILE", help="where the page goes")
    # how a run draws its own page while it goes on
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    directories = [Path(run) for run in given.runs]
    if given.beside:
        return beside(directories[0])
    return exit_status(lambda: draw(directories, given.output), (ConfigError, OSError))


def beside(directory: Path) -> int:
    """Draws the page of a run that goes on: at low priority, without output, ignoring signals."""
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
    """Writes the page; returns where it is, and how two runs compare."""
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such folder; give the directory of a run")
    if len(directories) > MOST_RUNS:
        raise ConfigError(f"{len(directories)} runs: give at most {MOST_RUNS}")
    payload = read(directories)
    title = " · ".join(run["name"] for run in payload["runs"]) or directories[0].absolute().name
    name = FILE if len(directories) == 1 else "comparison.html"
    path = Path(output) if output else directories[0] / name
    # two processes may draw at once, of a run that was killed and of the one in its place
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_whole(aside, render(payload, title))
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({brief(error)}); give another place with --output"
        ) from None
    finally:
        aside.unlink(missing_ok=True)
    return "\n".join([*verdicts(payload), f"report: {path}"])


def verdicts(payload: dict[str, Any]) -> list[str]:
    """Returns how two runs compare, or how each of several compares with the first."""
    if payload.get("same"):
        return [payload["same"]["verdict"]["text"]]
    return [
        f"{run['name']}: {run['verdict']['text']}" for run in payload["runs"] if "verdict" in run
    ]


def read(directories: list[Path]) -> dict[str, Any]:
    """Reads what the page shows: a sweep, one run, or several."""
    made = time.time()
    if len(directories) == 1 and is_sweep(directories[0]):
        return {"made": made, "runs": [], "sweep": read_sweep(directories[0])}
    alone = len(directories) == 1
    room = MOST_BYTES - shell_bytes() - REST_BYTES if alone else 0
    runs = [read_run(directory, POINTS, room, len(directories)) for directory in directories]
    tell_apart(runs)
    payload: dict[str, Any] = {"made": made, "runs": runs}
    if len(directories) == 2:
        payload["same"] = compare(*directories)
    for run, directory in zip(runs[1:], directories[1:], strict=True):
        if 2 < len(runs) <= MOST_COMPARED:
            run["verdict"] = compare(directories[0], directory)["verdict"]
    return payload


def tell_apart(runs: list[dict[str, Any]]) -> None:
    """Adds the directory to a name that several runs have."""
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = f"{run['name']} ({run['directory']})"


if __name__ == "__main__":
    gc.disable()  # it would look through all rows, again and again, and find nothing to free
    sys.exit(main(sys.argv[1:]))
