"""Runs jobs as processes, several at once, each with its share of the machine, and forwards signals
to them.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from utils.errors import ConfigError, Stopped, visible
from utils.ranks import signals
from utils.ranks.launchers import FAMILIES
from utils.rundir.status import COPY, FINAL
from utils.sweep.jobs import Job, command

LOOK_S = 0.1
PATIENCE_S = 30.0  # for children whose sweep fails itself
PR_SET_PDEATHSIG = 1
# variables by which a child would take itself for the launcher's rank that started it
NUMBERED = {family.rank for family in FAMILIES.values()}
NOT_THEIRS = {"MASTER_ADDR", "MASTER_PORT", COPY}  # the sweep itself writes COPY


@dataclass
class Child:
    """A job that is running."""

    job: Job
    process: subprocess.Popen[bytes]
    share: int  # the number of its share of the machine
    signalled: int = 0  # the first signal that was sent to it
    # the beginning of a line, by file descriptor
    unfinished: dict[int, bytes] = field(default_factory=dict)


class Children:
    """Starts jobs until there are no more."""

    def __init__(
        self, options: Sequence[str], shares: Sequence[Mapping[str, str]], ranks: int
    ) -> None:
        """`shares` are environment variables, one set for each job that runs at once; `ranks` is
        the number of ranks of each job.
        """
        self._options, self._shares, self._ranks = options, shares, ranks
        self._running: list[Child] = []
        self._pipes = selectors.DefaultSelector()

    def run(
        self,
        next_job: Callable[[Collection[Path | None]], Job | None],
        on_end: Callable[[Job, int], None],
        is_bad: Callable[[Job], bool] = lambda job: False,
    ) -> None:
        """Runs jobs until `next_job` has no more.

        `next_job` returns a job whose directory is not among the busy ones, or None. `on_end` gets
        each job with its exit status. `is_bad` tells whether to stop a job early.
        """
        signals.install(
            1, self._kill_all
        )  # as rank 1, which prints nothing about signals: the children do
        signals.defer()
        forwarded = False
        try:
            while True:
                if not signals.stop_signal():
                    while len(self._running) < len(self._shares):
                        job = next_job({child.job.directory for child in self._running})
                        if job is None:
                            break
                        self._start(job)
                elif not forwarded:
                    forwarded = True
                    self.signal_all(signals.stop_signal())
                if not self._running:
                    break
                self._listen()
                for child in list(self._running):
                    over = child.process.poll() is not None
                    child.job.locate(child.process.pid if self._ranks == 1 else None)
                    if over:
                        self._end(child)
                        on_end(child.job, self._status(child))
                    elif not child.signalled and not signals.stop_signal() and is_bad(child.job):
                        _signal(child, signal.SIGTERM)
        finally:
            self._stop_all()
        if signum := signals.stop_signal():
            raise Stopped(
                signum,
                f"{signal.Signals(signum).name}: the sweep has stopped; the same command goes on"
                " with it",
            )

    def signal_all(self, signum: int) -> None:
        """Sends a signal to all running jobs."""
        for child in self._running:
            _signal(child, signum)

    def _start(self, job: Job) -> None:
        environment = {
            key: value for key, value in os.environ.items() if key not in NUMBERED | NOT_THEIRS
        } | {**self._free_share()[1]}
        job.begun, job.evaluation = time.time(), None
        apart = subprocess.PIPE if len(self._shares) > 1 else None
        process = subprocess.Popen(
            command(self._options, job, self._ranks),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=apart,
            stderr=apart,
            start_new_session=True,
            preexec_fn=_with_parent(),
        )
        child = Child(job, process, self._free_share()[0])
        self._running.append(child)
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._pipes.register(stream, selectors.EVENT_READ, (child, out))

    def _free_share(self) -> tuple[int, Mapping[str, str]]:
        taken = {child.share for child in self._running}
        return next(
            (number, share) for number, share in enumerate(self._shares) if number not in taken
        )

    def _listen(self) -> None:
        if not self._pipes.get_map():
            time.sleep(LOOK_S)
        for key, _ in self._pipes.select(LOOK_S) if self._pipes.get_map() else ():
            if not self._take(key.fileobj, *key.data):  # type: ignore[arg-type]
                self._pipes.unregister(key.fileobj)

    def _take(self, stream: IO[bytes], child: Child, out: Any) -> bool:
        """Prints whole lines after the job's number; returns whether there may be more."""
        try:
            text = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, rest = (child.unfinished.pop(stream.fileno(), b"") + text).split(b"\n")
        child.unfinished[stream.fileno()] = rest
        for line in lines if text else [rest] if rest else []:
            _say(out, f"{child.job.number}: {visible(line.decode(errors='replace'))}")
        return bool(text)

    def _end(self, child: Child) -> None:
        self._running.remove(child)
        for key in list(self._pipes.get_map().values()):
            if key.data[0] is child:
                while self._take(key.fileobj, *key.data) and _ready(key.fileobj):  # type: ignore[arg-type]
                    pass
                self._pipes.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]

    def _status(self, child: Child) -> int:
        """Returns the run's exit status, from status.json if torchrun hides it. A run that a signal
        killed before it handled signals counts as stopped.
        """
        status, row = child.process.returncode, child.job.status_row()
        # Slurm signals jobs and sweep at once
        recorded, signum = row.get("exit_status"), child.signalled or signals.stop_signal()
        if self._ranks > 1 and status and row.get("state") in FINAL and isinstance(recorded, int):
            return recorded or status
        if status and signum and row.get("state") != "failed":
            return signals.STATUS[signum]
        if status < 0:
            _say(sys.stderr, f"{child.job.name} was killed by {_name(-status)}")
            return 1
        return status

    def _stop_all(self) -> None:
        """Asks all jobs to save and end when the sweep itself fails."""
        self.signal_all(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while (
            any(child.process.poll() is None for child in self._running)
            and time.monotonic() < deadline
        ):
            self._listen()
        self._kill_all(0, "")

    def _kill_all(self, signum: int, line: str) -> bool:
        for child in self._running:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        return True


def shares(
    at_once: int, ranks: int, environment: Mapping[str, str], gpus: Sequence[str], cores: int
) -> list[dict[str, str]]:
    """Returns each job's share of the machine: its GPUs, and equally many cores for each rank."""
    if at_once == ranks == 1:
        return [{}]
    if 0 < len(gpus) < ranks:
        raise ConfigError(
            f"sweep.ranks={ranks}: there"
            f" {'is 1 GPU' if len(gpus) == 1 else f'are {len(gpus)} GPUs'}, and each rank takes one"
        )
    each: list[dict[str, str]] = [{} for _ in range(at_once)]
    for number, share in enumerate(each):
        if "OMP_NUM_THREADS" not in environment:
            share["OMP_NUM_THREADS"] = str(max(1, cores // (at_once * ranks)))
        if gpus:  # jobs share them if there are too few
            share["CUDA_VISIBLE_DEVICES"] = ",".join(
                gpus[(number * ranks + rank) % len(gpus)] for rank in range(ranks)
            )
    return each


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return (
            []
            if given.startswith("-")
            else [name.strip() for name in given.split(",") if name.strip()]
        )
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _with_parent() -> Callable[[], object] | None:
    """Returns what a child calls first, so that it saves and ends if the sweep is killed."""
    return (
        partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        if sys.platform == "linux"
        else None
    )


def _signal(child: Child, signum: int) -> None:
    child.signalled = child.signalled or signum
    child.process.send_signal(signum)


def _name(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def _ready(stream: Any) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(0))


def _say(stream: Any, text: str) -> None:
    with suppress(OSError, ValueError):  # a closed pipe is no reason to end a run
        print(text, file=stream, flush=True)
