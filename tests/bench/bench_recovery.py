"""How long two ranks take to end, and to go on, after something has happened to one: `python -m
tests.bench.bench_recovery`.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.runs import QUIET, TORCHRUN, TROUBLED, Result, faulty, launched

ROUNDS = 5
ARGUMENTS = [*TROUBLED, "log_interval=1"]
TIMEOUT_S = 8  # what TROUBLED says


def fault_at(text: str) -> float:
    """The moment of the planted fault, by the monotonic clock."""
    moments = re.findall(r"^FAULT \S+ (\S+)$", text, re.MULTILINE)
    assert len(moments) == 1, text
    (moment,) = moments
    return float(moment)


def until_all_have_ended(fault: str, directory: Path) -> float:
    done = faulty(directory, fault, 1, 13, *ARGUMENTS, ranks=2)
    ended = time.monotonic()
    return ended - fault_at("".join(rank.stdout for rank in done))


def until_the_next_step(fault: str, directory: Path) -> float:
    """Under torchrun, which starts all ranks again; they go on from the newest checkpoint."""
    command = [
        *TORCHRUN,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.1",
    ]
    command += [
        "-m",
        "tests.faults",
        fault,
        "1",
        "13",
        *QUIET,
        f"checkpoint_path={directory}",
        *ARGUMENTS,
    ]
    done = launched(command)
    assert done.returncode == 0, done.stderr
    planted = fault_at(done.stdout) + time.time() - time.monotonic()
    return (
        min(row["time"] for row in Result(directory).rows if row["time"] > planted + 0.2) - planted
    )


def main() -> None:
    cases: list[tuple[str, Callable[[Path], float]]] = [
        (
            "error on one rank: all have ended",
            lambda path: until_all_have_ended("raise@objective", path),
        ),
        ("kill -9: all have ended", lambda path: until_all_have_ended("kill@objective", path)),
        (
            "SIGTERM: saved, and all have ended",
            lambda path: until_all_have_ended("SIGTERM@objective", path),
        ),
        (
            f"hang: all have ended, timeout_s={TIMEOUT_S} included",
            lambda path: until_all_have_ended("hang@objective", path),
        ),
        (
            "kill -9 under torchrun: the next step is done",
            lambda path: until_the_next_step("kill@objective", path),
        ),
    ]
    print("| what happens to one of two ranks, and until when | median s | most s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, measured) in enumerate(cases):
            seconds = [measured(Path(scratch) / f"{number}-{turn}") for turn in range(ROUNDS)]
            print(f"| {name} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |", flush=True)


if __name__ == "__main__":
    main()
