"""The run directory: everything a run writes and prints.

Rank 0 writes. All ranks call every method alike: some of them agree, or end all ranks.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from utils import revision
from utils.errors import Busy, ConfigError, RunError, Stopped, brief, visible_lines
from utils.files import safe_name, write_whole
from utils.ranks.distributed import Dist
from utils.ranks.signals import STATUS
from utils.rundir import folders
from utils.rundir.append import AppendedFile, Troubles, keep_rows, note
from utils.rundir.loggers import Loggers
from utils.rundir.maker import PATIENCE_S, REPORT_FILE, Maker
from utils.rundir.status import FINAL, Status, other_writer
from utils.rundir.terminal import Progress, show


class RunDirectory:
    """Directory, log, metrics, status, loggers and terminal of one run.

    `with run:` locks the directory for this process.
    """

    def __init__(self, directory: Path, dist: Dist, evaluates: bool = False) -> None:
        """With `evaluates`, `begin` chooses an unused directory instead, for an evaluation."""
        self.directory, self.dist, self._evaluates = directory, dist, evaluates
        self.progress = Progress(show if dist.is_main else lambda line: None)
        # the id under which W&B continues this run; `begin` takes it as the setting `id`
        self.wandb_id: str | None = None
        self._lock: folders.FileLock | None = None
        self._loggers = Loggers(self.say, dist.timeout_s / 2)
        self._troubles = Troubles(self.say)
        # these are there from `begin` on, on rank 0
        self._status: Status | None = None
        self._metrics: AppendedFile | None = None
        self._log: AppendedFile | None = None
        self._events: AppendedFile | None = None
        self._page: Maker | None = None  # if a report is asked for
        self._early: list[str] = []  # lines printed before there is a log
        self._step: int | None = None
        self._began = 0  # the step at which this start began

    def __enter__(self) -> RunDirectory:
        try:
            other = ""
            with self.dist.agreed():
                if self.dist.is_main:
                    folders.refuse_links(self.directory)
                    if not self._evaluates:
                        folders.refuse_foreign(self.directory)
                        # before anything in it is read
                        self._lock = folders.lock(self.directory)
                        unnamed = "which has just begun" if self._lock is None else ""
                        other = other_writer(self.directory) or unnamed
            if other := self.dist.broadcast_text(other):
                raise Busy(
                    f"checkpoint_path={self.directory}: another run ({other}) writes there; stop it"
                    " or give another run_name"
                )
        except BaseException:
            folders.unlock(self._lock)
            raise
        return self

    def begin(
        self,
        config_text: str,
        loggers: Mapping[str, Any],
        resumed: int | None = None,
        evaluation_due: bool = False,
        facts: Mapping[str, Any] | None = None,
        report: bool = False,
    ) -> None:
        """Makes the directory on rank 0, or continues the one there at the step `resumed`.

        A former run is moved aside; nothing is written before. `loggers` are the settings
        that `Loggers.start` takes; `facts` are recorded with the start, and `report` says whether
        to draw the page.
        """
        hosts = self.dist.all_gather_text(socket.gethostname())
        facts = facts or {}
        with self.dist.agreed():
            if self.dist.is_main:
                self._step, self._began = resumed, resumed or 0
                moved = ""
                if self._evaluates:
                    self.directory = folders.make_another(self.directory)
                else:
                    moved = folders.make(self.directory, move=resumed is None)
                self._metrics, self._log, self._events, self._status = open_files(
                    self.directory, config_text, resumed, evaluation_due, self._troubles
                )
                for line in self._early:
                    note(self._log, line)
                self.mark("running")
                self._status.keep_alive(lambda: self._step)
                self._page = Maker(self.directory, partial(note, self._log)) if report else None
                if self.dist.watch is not None:

                    def last_words(cause: str) -> None:
                        """Called where the main thread cannot end by itself."""
                        self.mark("failed", cause, exit_status=1)
                        if self._page is not None:
                            self._page.finish(0.0)

                    self.dist.watch.last_words = last_words
                if moved:
                    self.say(f"the former run of this name is now {moved}")
                if resumed is not None:
                    self.say(f"continued at step {resumed}")
                with self._troubles.writing("git.txt"):
                    if old := revision.record(self.directory):
                        changed = "the code has changed since this run was last started"
                        self.say(f"{changed}, as {old} says")
                start = start_facts(self.dist, resumed is not None, hosts)
                self.event("started", self._began, **start, **facts)
                of_run = {"num_params": facts.get("parameters")}  # as in HRM's runs
                of_run |= {"ranks": self.dist.world_size, "revision": revision.revision()}
                self.wandb_id = self._loggers.start(self.directory, loggers, resumed, of_run)
        self.directory = Path(self.dist.broadcast_text(str(self.directory)))

    def say(self, text: str) -> None:
        """Writes a line to the terminal and to log.txt; names in it may be a stranger's."""
        if not self.dist.is_main:
            return
        text = visible_lines(text)
        show(text)
        if self._log is None:
            self._early.append(text)
        else:
            note(self._log, text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line to metrics.jsonl, and sends it to the loggers."""
        if self._metrics is None:
            return
        self._step = step
        values = {name: _strict(value) for name, value in metrics.items()}
        row = {"step": step, "time": round(time.time(), 3), **values}
        self._metrics.write(json.dumps(row, allow_nan=False))
        self._loggers.log(step, metrics)

    def event(self, name: str, step: int | None, **facts: Any) -> None:
        """Appends a line to events.jsonl: what happened to the run, beside its metrics."""
        if self._events is not None:
            row = {"time": round(time.time(), 3), "event": name, "step": step, **facts}
            self._events.write(json.dumps(row))

    def write_evaluation(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Writes the files of one evaluated set to a folder under `evaluations`."""
        if not files or self._status is None or self._status.lost():
            return
        with self._troubles.writing("evaluations"):
            folder = self.directory / "evaluations" / f"step_{step}" / safe_name(set_name)
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_whole(folder / safe_name(name), content)
        self._loggers.show(step, set_name, files)

    def draw_report(self) -> None:
        """Draws report.html again, in a separate process."""
        if self._page is not None:
            self._page.draw()

    def mark(
        self, state: str, reason: str = "", step: int | None = None, exit_status: int | None = None
    ) -> None:
        """Writes status.json: `running`, or how the run ended, which the first call decides.

        Without a step, it takes the last one logged.
        """
        if self._status is None or self._status.state in FINAL:
            return
        step = self._step if step is None else step
        self._status.write(state, reason, step, exit_status)
        if state in FINAL:
            self.event("ended", step, state=state, reason=reason)

    def check_place(self) -> None:
        """Raises on all ranks if the directory no longer belongs to this run."""
        with self.dist.agreed():
            if self._status is not None and (why := self._status.lost()):
                raise RunError(f"checkpoint_path={self.directory}: {why}")

    def finish(self, step: int) -> None:
        """Marks the run as finished on all ranks, unless its directory is gone."""
        self.check_place()
        self.say(f"files: {self.directory}")
        self.mark("finished", step=step, exit_status=0)
        if self._page is not None:
            self._page.finish(PATIENCE_S)
            self.say(f"report: {self.directory / REPORT_FILE}")

    def stop(self, signum: int, step: int, hint: str) -> NoReturn:
        """Ends a run that was asked to stop. The hint says what comes next.

        status.json has the reason, since launchers lose exit statuses. It says `requeue` only if
        this start has done a step, and never for an evaluation: otherwise a scheduler that obeys it
        would restart a run forever.
        """
        again = signum == signal.SIGUSR1 and step > self._began and not self._evaluates
        what = "to be run again" if again else "stopped"
        if signum == signal.SIGUSR1 and not self._evaluates and not again:
            what = "no step since it began, so it is not requeued"
        message = f"{signal.Signals(signum).name} after step {step:,}: {what}; {hint}"
        self.mark("requeue" if again else "stopped", message, step, STATUS[signum])
        raise Stopped(signum, message)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        if error is not None:
            # if another rank failed first, its error is the cause
            cause = self.dist.watch.cause if self.dist.watch is not None else None
            reason = cause.text if cause else f"{type(error).__name__}: {error}".rstrip(": ")
            self.mark("stopped" if stopped else "failed", reason[:500])
        # a scheduler that asked to stop does not wait long, nor do the other ranks of a failed run
        failed_together = error is not None and self.dist.world_size > 1
        self.close(error is None or isinstance(error, Stopped), stopped or failed_together)

    def close(self, ok: bool = True, hurry: bool = False) -> None:
        """Ends the run; may be called twice. In a hurry loggers get only a few seconds."""
        if self.dist.watch is not None:
            self.dist.watch.last_words = lambda cause: None
        if self._page is not None:
            self._page.finish(0.0 if hurry else PATIENCE_S)
        self._loggers.close(ok, hurry)
        for file in (self._metrics, self._log, self._events, self._status):
            if file is not None:
                file.close()
        folders.unlock(self._lock)


def open_files(
    folder: Path, config_text: str, resumed: int | None, evaluation_due: bool, troubles: Troubles
) -> tuple[AppendedFile, AppendedFile, AppendedFile, Status]:
    """Opens metrics, log, events and status, without rows later than the step `resumed`."""
    try:
        write_whole(folder / folders.CONFIG_FILE, folders.MARK + config_text)
        if resumed is not None:
            keep_rows(folder / "metrics.jsonl", resumed, evaluation_due)
        names = ("metrics.jsonl", "log.txt", "events.jsonl")
        metrics, log, events = (AppendedFile(folder / name, troubles) for name in names)
        return metrics, log, events, Status(folder, troubles)
    except OSError as error:
        raise ConfigError(
            f"checkpoint_path={folder}: cannot be written ({brief(error)}); give a folder you may"
            " write to, with room in it"
        ) from None


def start_facts(dist: Dist, resumed: bool, hosts: Sequence[str]) -> dict[str, Any]:
    """Returns where, and with what, a run has been started."""
    cuda = dist.device.type == "cuda"
    return {
        "resumed": resumed,
        "ranks": dist.world_size,
        "hosts": sorted({*hosts}),
        "launcher": dist.launcher,
        "device": torch.cuda.get_device_name(dist.device) if cuda else "CPU",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "code": revision.summary(),
        "arguments": sys.argv[1:],
    }


def _strict(value: Any) -> float | int | None:
    """The number, or None for NaN and infinities, which strict JSON lacks."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
