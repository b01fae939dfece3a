"""Runs jobs as processes, several at once, each with its share of the machine, and forwards signals
to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from utils.command.root import Config, Sweep
from utils.errors import ConfigError, Stopped, visible
from utils.files import ROOT, read_row
from utils.ranks import signals
from utils.ranks.launchers import FAMILIES
from utils.rundir.status import FINAL, STATUS_FILE, STATUS_VARIABLE

LOOK_S = 0.1
PRINT_S = 2.0  # for the last lines of a job, whose pipe a child process may keep open
# variables that would make a child think that it is a rank
NOT_FOR_CHILDREN = {
    *(family.rank for family in FAMILIES.values()),
    *("MASTER_ADDR", "MASTER_PORT", STATUS_VARIABLE),
}
TORCHRUN = [
    *("-m", "torch.distributed.run", "--standalone"),
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
]


@dataclass
class Job:
    """One run of a sweep; if its configuration is wrong, `error` says why."""

    number: int  # from 1
    overrides: list[str]
    config: Config | None
    error: str = ""
    status: int = 0  # with which it ended

    @property
    def directory(self) -> Path | None:
        return None if self.config is None else Path(self.config.checkpoint_path)

    def row(self) -> dict[str, Any]:
        """Returns what the report reads of a job."""
        pairs = (override.partition("=") for override in self.overrides)
        about = {key.lstrip("+~"): value for key, _, value in pairs if key[:6] != "sweep."}
        directory = str(self.directory or "")
        return {"number": self.number, "overrides": about, "directory": directory}

    def command(self, ranks: int) -> list[str]:
        """Returns the command that runs it as a separate process, under its name."""
        assert self.config is not None
        overrides = [text for text in self.overrides if not text.startswith("sweep.")]
        name = self.config.run_name
        if self.config.eval_only:
            name = name.removesuffix("-evaluation")
        launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else []
        program = str(ROOT / "pretrain.py")
        return [sys.executable, *launcher, program, *_options(), *overrides, f"run_name='{name}'"]

    def status_row(self) -> dict[str, Any]:
        return read_row(self.directory / STATUS_FILE) if self.directory else {}


@dataclass
class Child:
    """A job that is running."""

    job: Job
    process: subprocess.Popen[bytes]
    share: int  # the number of its share of the machine
    printers: list[threading.Thread]  # of what it prints


class Children:
    """Starts jobs until there are no more."""

    def __init__(self, settings: Sweep, jobs: Sequence[Job], on_end: Callable[[], object]) -> None:
        """`settings` are the keys `sweep.*`; `on_end` is called whenever a job has ended."""
        self._settings, self._on_end = settings, on_end
        self._all, self._left = jobs, [job for job in jobs if not job.error]
        for job in jobs:
            if job.error:
                signals.say(f"error: job {job.number}: {job.error}")
                job.status = 2
        at_once = min(settings.jobs, len(self._left))
        device = self._left[0].config.device if self._left else "cpu"  # type: ignore[union-attr]
        gpus = [] if device == "cpu" or at_once * settings.ranks == 1 else gpus_here(os.environ)
        self._shares = shares(
            at_once, settings.ranks, os.environ, gpus, len(os.sched_getaffinity(0))
        )
        self._running: list[Child] = []

    def run(self) -> None:
        """Runs all jobs; raises Stopped if a signal came, once the jobs have saved and ended."""
        # as rank 1, which prints nothing about signals, since the children do
        signals.install(1, self._kill_all)
        signals.defer()
        forwarded = False
        try:
            while self._running or self._next() is not None:
                if signum := signals.stop_signal():
                    if not forwarded:
                        for child in self._running:
                            child.process.send_signal(signum)
                    forwarded = True
                    if not self._running:
                        break
                while len(self._running) < len(self._shares) and (job := self._next()):
                    self._start(job)
                time.sleep(LOOK_S)
                for child in list(self._running):
                    if child.process.poll() is not None:
                        self._end(child)
                        self._on_end()
        finally:
            self._kill_all(0, "")
        if signum := signals.stop_signal():
            name = signal.Signals(signum).name
            raise Stopped(signum, f"{name}: the sweep has stopped; the same command goes on")

    def _next(self) -> Job | None:
        """Returns the next job; if two jobs are the same run, the second waits."""
        failed = self._settings.on_error == "stop" and any(job.status for job in self._all)
        busy = {child.job.directory for child in self._running}
        if not self._left or failed or signals.stop_signal() or self._left[0].directory in busy:
            return None
        return self._left[0]

    def _start(self, job: Job) -> None:
        self._left.remove(job)
        taken = {child.share for child in self._running}
        number = next(i for i in range(len(self._shares)) if i not in taken)
        environment = {
            key: value for key, value in os.environ.items() if key not in NOT_FOR_CHILDREN
        }
        apart = subprocess.PIPE if len(self._shares) > 1 else None
        print(f"job {job.number}: {' '.join(job.overrides)}", flush=True)
        process = subprocess.Popen(
            job.command(self._settings.ranks),
            env=environment | self._shares[number],
            stdin=subprocess.DEVNULL,
            stdout=apart,
            stderr=apart,
            start_new_session=True,
        )
        printers = [
            threading.Thread(target=_print_lines, args=(stream, out, job.number), daemon=True)
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            if stream is not None
        ]
        for printer in printers:
            printer.start()
        self._running.append(Child(job, process, number, printers))

    def _end(self, child: Child) -> None:
        self._running.remove(child)
        for printer in child.printers:
            printer.join(PRINT_S)
        status, row = child.process.returncode, child.job.status_row()
        # torchrun hides the status of its ranks
        recorded = row.get("exit_status") if row.get("state") in FINAL else None
        if self._settings.ranks > 1 and status and isinstance(recorded, int):
            status = recorded or status
        child.job.status = 1 if status < 0 else status

    def _kill_all(self, signum: int, line: str) -> bool:
        for child in self._running:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        return True


def _print_lines(stream: IO[bytes], out: TextIO, number: int) -> None:
    """Prints the lines of a job after its number."""
    for line in stream:
        text = visible(line.decode(errors="replace").rstrip("\n"))
        # where the reader has gone, reading goes on, or the job would wait for room in the pipe
        with suppress(OSError, ValueError):
            out.write(f"{number}: {text}\n")  # in one piece: other jobs print as well
            out.flush()


def _options() -> list[str]:
    """Returns the options of this process that its jobs need as well: where configurations lie."""
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else []
    return [*(option for option in options if option not in ("-m", "--multirun")), "--"]


def shares(
    at_once: int, ranks: int, environment: Mapping[str, str], gpus: Sequence[str], cores: int
) -> list[dict[str, str]]:
    """Returns each job's share of the machine: its GPUs, and equally many cores for each rank."""
    if 0 < len(gpus) < ranks:
        raise ConfigError(
            f"sweep.ranks={ranks}: there are {len(gpus)} GPUs, and each rank takes one"
        )
    parts: list[dict[str, str]] = [{} for _ in range(at_once)]
    if at_once * ranks == 1:
        return parts
    for number, share in enumerate(parts):
        if "OMP_NUM_THREADS" not in environment:
            share["OMP_NUM_THREADS"] = str(max(1, cores // (at_once * ranks)))
        if gpus:  # jobs share them if there are too few
            taken = (gpus[(number * ranks + rank) % len(gpus)] for rank in range(ranks))
            share["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    return parts


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    names = [name.strip() for name in listed.split(",")]
    return [] if listed.startswith("-") else [name for name in names if name]
