"""The table of a sweep, as `summary.csv` and as text with the best first.

It follows from the jobs and their run directories alone, so that each task of a job array can write
it whole.
"""

from __future__ import annotations

import csv
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.errors import ConfigError, brief
from utils.files import read_text, write_whole
from utils.ranks import signals
from utils.rundir.lock import Lock
from utils.rundir.progress import duration
from utils.sweep.jobs import Job, differing
from utils.sweep.results import Result, result_in, state_in

FILE = "summary.csv"
FAILED, WAITING = "failed", "waiting"
PATIENCE_S = 5.0  # to wait for another process that writes the table
COLUMNS = ("job", "overrides", "state", "metric", "value", "best", "steps", "seconds", "directory")


@dataclass(frozen=True)
class Row:
    """One job."""

    job: Job
    overrides: str  # those in which jobs differ
    state: str
    result: Result

    def cells(self) -> list[str]:
        """The cells in the order of COLUMNS, empty where nothing is known."""
        result = self.result
        numbers = [
            result.last,
            result.best,
            result.step,
            round(result.seconds, 1) if result.step is not None else None,
        ]
        shown = ["" if number is None else repr(number) for number in numbers]
        return [
            str(self.job.number),
            self.overrides,
            self.state,
            result.metric,
            *shown,
            str(self.job.directory or ""),
        ]


def rows_of(
    jobs: Sequence[Job], known: Mapping[int, str], before: Mapping[tuple[str, str], str]
) -> list[Row]:
    """Returns the rows of all jobs. If a job's directory does not tell how it ended, `known` does
    for jobs of this process, and `before` (what the table held) for others.
    """
    rows = []
    for job, overrides in zip(jobs, differing(jobs), strict=True):
        state = known.get(job.number) or state_in(job.directory)
        if not state:  # it has no directory yet
            state = (
                FAILED
                if job.error or before.get((str(job.number), overrides)) == FAILED
                else WAITING
            )
        rows.append(Row(job, overrides, state, result_in(job.directory)))
    return rows


def write(folder: Path, jobs: Sequence[Job], known: Mapping[int, str]) -> list[Row]:
    """Writes the file anew; returns its rows."""
    # a name of its own, in case the disk has no locks
    aside = folder / f".{socket.gethostname()}-{os.getpid()}.csv"
    lock = Lock(folder / FILE)
    rows: list[Row] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + PATIENCE_S
        # what another task of a job array has written must not get lost
        while lock.acquire() and time.monotonic() < deadline:
            time.sleep(0.02)
        rows = rows_of(jobs, known, _states(folder / FILE))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *(row.cells() for row in rows)])
        write_whole(aside, text.getvalue())
        os.replace(aside, folder / FILE)
    except (OSError, ConfigError) as error:
        signals.say(f"{folder / FILE} cannot be written ({brief(error)}); the sweep goes on")
    finally:
        lock.release()
    return rows or rows_of(jobs, known, {})


def table(rows: Sequence[Row]) -> str:
    """Returns the table as text, best first; jobs without a value come last."""
    metrics = {row.result.metric for row in rows if row.result.metric}

    def rank(row: Row) -> tuple[bool, float, int]:
        value = row.result.last
        return (
            value is None,
            0.0 if value is None else value if row.result.lower_is_better else -value,
            row.job.number,
        )

    title = metrics.pop() if len(metrics) == 1 else "value"
    lines = [["job", "overrides", "state", title, "best", "steps", "time", "directory"]]
    for row in sorted(rows, key=rank):
        result = row.result
        values = ["" if value is None else f"{value:.6g}" for value in (result.last, result.best)]
        steps = [
            "" if result.step is None else f"{result.step:,}",
            "" if result.step is None else duration(result.seconds),
        ]
        lines.append(
            [
                str(row.job.number),
                row.overrides,
                row.state,
                *values,
                *steps,
                str(row.job.directory or row.job.error),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)
        ).rstrip()
        for line in lines
    )


def _states(path: Path) -> dict[tuple[str, str], str]:
    """Reads the states that other processes wrote, by number and overrides: the file may belong to
    another sweep.
    """
    try:
        rows = csv.DictReader(io.StringIO(read_text(path)))
        return {
            (row.get("job", ""), row.get("overrides", "")): row.get("state", "") for row in rows
        }
    except (OSError, ValueError, csv.Error):
        return {}
