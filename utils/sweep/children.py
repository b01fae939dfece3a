"""Runs jobs as processes: so many at once, each with its share of the machine; signals go on to
all.
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
# by these a child of one rank of a launcher would take itself for that rank
NUMBERED = {family.rank for family in FAMILIES.values()}
NOT_THEIRS = {"MASTER_ADDR", "MASTER_PORT", COPY}  # how all ended is for the sweep to say


@dataclass
class Child:
    """A job that is running."""

    job: Job
    process: subprocess.Popen[bytes]
    share: int  # the number of its share of the machine
    asked: int = 0  # the first signal that was handed on to it
    # the beginning of a line, by file descriptor
    unfinished: dict[int, bytes] = field(default_factory=dict)


class Children:
    """Starts jobs until there are no more."""

    def __init__(
        self, options: Sequence[str], shares: Sequence[Mapping[str, str]], ranks: int
    ) -> None:
        """A share of the machine for each of those that run at once: variables of their
        environment.
        """
        self._options, self._shares, self._ranks = options, shares, ranks
        self._running: list[Child] = []
        self._pipes = selectors.DefaultSelector()

    def run(
        self,
        following: Callable[[Collection[Path | None]], Job | None],
        ended: Callable[[Job, int], None],
        bad: Callable[[Job], bool] = lambda job: False,
    ) -> None:
        """`following` gives jobs whose directories are not busy, `ended` hears their exit statuses,
        `bad` tells whether to stop one.
        """
        signals.install(1, self._killed_too)  # rank 1's do not speak: children say what they do
        signals.defer()
        handed_on = False
        try:
            while True:
                if not signals.stop_signal():
                    while len(self._running) < len(self._shares):
                        job = following({child.job.directory for child in self._running})
                        if job is None:
                            break
                        self._start(job)
                elif not handed_on:
                    handed_on = True
                    self.ask(signals.stop_signal())
                if not self._running:
                    break
                self._listen()
                for child in list(self._running):
                    over = child.process.poll() is not None
                    child.job.locate(child.process.pid if self._ranks == 1 else None)
                    if over:
                        self._end(child)
                        ended(child.job, self._status(child))
                    elif not child.asked and not signals.stop_signal() and bad(child.job):
                        _ask(child, signal.SIGTERM)
        finally:
            self._stop_all()
        if signum := signals.stop_signal():
            raise Stopped(
                signum,
                f"{signal.Signals(signum).name}: the sweep has stopped; the same command goes on"
                " with it",
            )

    def ask(self, signum: int) -> None:
        """Sends a signal to the job."""
        for child in self._running:
            _ask(child, signum)

    def _start(self, job: Job) -> None:
        environment = {
            key: value for key, value in os.environ.items() if key not in NUMBERED | NOT_THEIRS
        } | {**self._free_share()[1]}
        job.begun, job.mine = time.time(), None
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
        """The run's exit status, which torchrun hides; a run that does not handle signals yet is
        killed by them.
        """
        status, row = child.process.returncode, child.job.status_row()
        # Slurm signals jobs and sweep at once
        told, asked = row.get("exit_status"), child.asked or signals.stop_signal()
        if self._ranks > 1 and status and row.get("state") in FINAL and isinstance(told, int):
            return told or status
        if status and asked and row.get("state") != "failed":
            return signals.STATUS[asked]
        if status < 0:
            _say(sys.stderr, f"{child.job.name} was killed by {_name(-status)}")
            return 1
        return status

    def _stop_all(self) -> None:
        """Asks all jobs to save and end when the sweep itself fails."""
        self.ask(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while (
            any(child.process.poll() is None for child in self._running)
            and time.monotonic() < deadline
        ):
            self._listen()
        self._killed_too(0, "")

    def _killed_too(self, signum: int, line: str) -> bool:
        for child in self._running:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        return True


def shares(
    at_once: int, ranks: int, environment: Mapping[str, str], gpus: Sequence[str], cores: int
) -> list[dict[str, str]]:
    """Each job's share of the machine: GPUs of its own, and equally many cores for each rank."""
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
        if gpus:  # where there are fewer than ranks, jobs share
            share["CUDA_VISIBLE_DEVICES"] = ",".join(
                gpus[(number * ranks + rank) % len(gpus)] for rank in range(ranks)
            )
    return each


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
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
    """Called in a child: it saves and ends if the sweep is killed."""
    return (
        partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        if sys.platform == "linux"
        else None
    )


def _ask(child: Child, signum: int) -> None:
    child.asked = child.asked or signum
    child.process.send_signal(signum)


def _name(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def _ready(stream: Any) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(0))


def _say(stream: Any, text: str) -> None:
    with suppress(OSError, ValueError):  # that nobody reads any more is no reason to end a run
        print(text, file=stream, flush=True)
