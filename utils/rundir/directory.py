"""The run directory: everything a run writes and prints.

Rank 0 writes; on other ranks every method does nothing.
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
from contextlib import suppress
from datetime import timedelta
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
from utils.rundir.append import AppendedFile, Troubles, keep_rows
from utils.rundir.loggers import Loggers
from utils.rundir.maker import PATIENCE_S, REPORT_FILE, Maker
from utils.rundir.status import FINAL, Status, other_writer, state_of
from utils.rundir.wandb_log import resolve_mode

PAUSE_S = 10.0  # between lines of progress


class RunDirectory:
    """Directory, log, metrics, status, loggers and terminal of one run.

    `with run:` locks the directory for this process.
    """

    def __init__(self, directory: Path, dist: Dist, evaluates: bool = False) -> None:
        """With `evaluates`, `begin` chooses an unused directory instead, for an evaluation."""
        self.directory, self.dist, self._evaluates = directory, dist, evaluates
        self._lock = folders.Lock(directory)
        self._loggers = Loggers(self.say, dist.timeout_s / 2)
        self._troubles = Troubles(self._report)
        self._status: Status | None = None
        self._metrics: AppendedFile | None = None
        self._log: AppendedFile | None = None
        self._events: AppendedFile | None = None
        self._maker: Maker | None = None  # of the report page
        self._early: list[str] = []  # lines printed before there is a log
        self._step: int | None = None
        self._began = 0  # the step at which this start began
        # by what is counted: time and number when progress was first told
        self._first: dict[str, tuple[float, int]] = {}
        self._printed = -math.inf  # the time of the last such line

    @property
    def wandb_id(self) -> str | None:
        """The id under which W&B continues this run; `begin` takes it as the setting `id`."""
        return self._loggers.wandb_id

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

        A former run is moved aside; nothing is written before. `loggers` are the key `log` and
        what `Loggers.start` takes; `facts` are recorded with the start, and `report` says whether
        to draw the page.
        """
        # fails on all ranks alike, before rank 0 writes anything
        mode = resolve_mode(loggers.get("mode", "auto"), os.environ)
        hosts = self.dist.all_gather_text(socket.gethostname())
        with self.dist.agreed():
            if self.dist.is_main:
                self._begin(config_text, resumed, evaluation_due, report)
                self._record_start(resumed, hosts, facts or {})
                about = {
                    "num_params": (facts or {}).get("parameters"),  # as in HRM's runs
                    "ranks": self.dist.world_size,
                    "revision": revision.revision(),
                }
                names, settings = loggers.get("log", ["wandb"]), {**loggers, "mode": mode}
                self._loggers.start(self.directory, names, settings, resumed, about)
        self.directory = Path(self.dist.broadcast_text(str(self.directory)))

    def _begin(
        self, config_text: str, resumed: int | None, evaluation_due: bool, report: bool
    ) -> None:
        moved = ""
        if self._evaluates:
            self.directory = folders.make_another(self.directory)
        else:
            moved = folders.make(self.directory, move=resumed is None)
        try:
            write_whole(self.directory / folders.CONFIG_FILE, folders.MARK + config_text)
            if resumed is not None:
                keep_rows(self.directory / "metrics.jsonl", resumed, evaluation_due)
            self._metrics = AppendedFile(self.directory / "metrics.jsonl", self._troubles)
            self._log = AppendedFile(self.directory / "log.txt", self._troubles)
            self._events = AppendedFile(self.directory / "events.jsonl", self._troubles)
            self._status = Status(self.directory, self._troubles)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_path={self.directory}: cannot be written ({brief(error)}); give a"
                " folder you may write to, with room in it"
            ) from None
        self._step = resumed
        self._began = resumed or 0
        while self._early:
            self._note(self._early.pop(0))
        self.mark("running")
        self._maker = Maker(self.directory, self._note) if report else None
        self._status.keep_alive(lambda: self._step)
        if self.dist.watch is not None:  # it ends the process where the main thread cannot
            self.dist.watch.last_words = partial(self._fail, exit_status=1)
        if moved:
            self.say(f"the former run of this name is now {moved}")
        if resumed is not None:
            self.say(f"continued at step {resumed}")
        with self._troubles.writing("git.txt"):
            if old := revision.record(self.directory):
                self.say(f"the code has changed since this run was last started, as {old} says")

    def _record_start(
        self, resumed: int | None, hosts: Sequence[str], facts: Mapping[str, Any]
    ) -> None:
        device = self.dist.device
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else "CPU"
        self.event(
            "started",
            resumed or 0,
            resumed=resumed is not None,
            ranks=self.dist.world_size,
            hosts=sorted({*hosts}),
            launcher=self.dist.launcher,
            device=name,
            threads=torch.get_num_threads(),
            cores=os.cpu_count(),
            torch=torch.__version__,
            python=platform.python_version(),
            code=revision.summary(),
            arguments=sys.argv[1:],
            **facts,
        )

    def event(self, name: str, step: int | None, **facts: Any) -> None:
        """Appends a line to events.jsonl: what happened to the run, beside its metrics."""
        if (events := self._events) is not None:  # another thread may record while this one closes
            row = {"time": round(time.time(), 3), "event": name, "step": step, **facts}
            events.write(json.dumps(row))

    def draw_report(self) -> None:
        """Draws report.html again, in a process of its own."""
        if self._maker is not None:
            self._maker.draw()

    def _finish_report(self, patience_s: float = PATIENCE_S) -> None:
        """Draws report.html for the last time."""
        maker, self._maker = self._maker, None
        if maker is not None and not self.lost():
            maker.finish(patience_s)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line to metrics.jsonl, and sends it to the loggers."""
        if self._metrics is None:
            return
        self._step = step
        values = {name: _strict(value) for name, value in metrics.items()}
        row = {"step": step, "time": round(time.time(), 3), **values}
        self._metrics.write(json.dumps(row, allow_nan=False))
        self._loggers.log(step, values)

    def say(self, text: str) -> None:
        """Writes a line to the terminal and to log.txt; names in it may be a stranger's."""
        text = visible_lines(text)
        self._print(text)
        if self._status is None and self.dist.is_main:
            self._early.append(text)
        self._note(text)

    def _note(self, text: str) -> None:
        if (log := self._log) is not None:  # another thread may speak while this one closes
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    def write_evaluation(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Writes the files of one evaluated set to a folder under `evaluations`."""
        if not files or self._metrics is None or self.lost():
            return
        with self._troubles.writing("evaluations"):
            folder = self.directory
            for name in ("evaluations", f"step_{step}", safe_name(set_name)):
                folder /= name
                folder.mkdir(exist_ok=True)  # and not the one above, which may be gone by now
            for name, content in files.items():
                write_whole(folder / safe_name(name), content)
        self._loggers.show(step, set_name, files)

    def progress(
        self,
        what: str,
        done: int,
        total: int,
        loss: float | None = None,
        headline_name: str = "",
        headline_value: float | None = None,
        examples_per_s: float | None = None,
    ) -> None:
        """Prints how many steps or examples are done, every ten seconds; None stands for a value
        that is not known yet. What begins again at 0, as each evaluation does, is timed anew.
        """
        now = time.monotonic()
        if not done:
            self._first[what] = now, 0
            if self._printed == -math.inf:  # a short evaluation needs no line
                self._printed = now
            return
        began, first = self._first.setdefault(what, (now, done))
        if done < total and now - self._printed < PAUSE_S:
            return
        self._printed = now
        texts = [f"{100 * done / max(1, total):3.0f}%", f"{what} {done}/{total}"]
        if loss is not None:
            texts.append(f"loss {loss:.3g}")
        if headline_value is not None:
            number = ".1%" if "accuracy" in headline_name else ".4g"
            texts.append(f"{headline_name.replace('_', ' ')} {headline_value:{number}}")
        if examples_per_s is not None:
            texts.append(f"{examples_per_s:,.0f} examples/s")
        if first < done < total:
            seconds = (now - began) / (done - first) * (total - done)
            texts.append(f"{timedelta(seconds=round(seconds))} left")
        self._print("  ".join(texts))

    def _print(self, text: str) -> None:
        # the reader may have gone (`| head`), the disk be full, or the stream closed
        with suppress(OSError, ValueError):
            if self.dist.is_main:
                print(text, flush=True)

    def mark(
        self, state: str, reason: str = "", step: int | None = None, exit_status: int | None = None
    ) -> None:
        """Writes status.json: `running`, `finished`, `stopped`, `requeue` or `failed`.

        Without a step, it takes the last one logged.
        """
        if self._status is None:
            return
        step = self._step if step is None else step
        self._status.write(state, reason, step, exit_status)
        if state in FINAL:
            self.event("ended", step, state=state, reason=reason)

    def lost(self) -> str:
        """Why the directory no longer belongs to this run, on rank 0; empty while it does."""
        if self._status is None or not (why := self._status.lost()):
            return ""
        return f"checkpoint_path={self.directory}: {why}"

    def check_place(self) -> None:
        """Raises on all ranks if the directory no longer belongs to this run."""
        with self.dist.agreed():
            if lost := self.lost():
                raise RunError(lost)

    def finish(self, step: int) -> None:
        """Marks the run as finished on all ranks, unless its directory is gone."""
        self.check_place()
        self.say(f"files: {self.directory}")
        self.mark("finished", step=step, exit_status=0)
        if self._maker is not None:
            self._finish_report()
            self.say(f"report: {self.directory / REPORT_FILE}")

    def confirm_finished(self, step: int) -> None:
        """Marks a run as finished that crashed between its last checkpoint and its end."""
        if self.dist.is_main and state_of(self.directory) != "finished":
            self._status = Status(self.directory, self._troubles)
            self.mark("finished", step=step, exit_status=0)

    def stop(self, signum: int, step: int, hint: str) -> NoReturn:
        """Ends a run that was asked to stop. The hint says what comes next.

        status.json has the reason, since launchers lose exit statuses. It says `requeue` only if
        this start has done a step, and never for an evaluation: otherwise a scheduler that obeys it
        would restart a run forever.
        """
        again = signum == signal.SIGUSR1 and step > self._began and not self._evaluates
        what = "to be run again" if again else "stopped"
        if signum == signal.SIGUSR1 and not self._evaluates and not again:
            what = "no step since it began, so not to be run again"
        message = f"{signal.Signals(signum).name} after step {step:,}: {what}; {hint}"
        self.mark("requeue" if again else "stopped", message, step, STATUS[signum])
        self.close(hurry=True)
        raise Stopped(signum, message)

    def close(self, ok: bool = True, hurry: bool = False) -> None:
        """Ends the run; may be called twice. In a hurry loggers get only a few seconds."""
        if self.dist.watch is not None:
            self.dist.watch.last_words = lambda cause: None
        if not ok:
            self._fail()
        self._finish_report(0.0 if hurry else PATIENCE_S)
        self._loggers.close(ok, hurry)
        for file in (self._metrics, self._log, self._events, self._status):
            if file is not None:
                file.close()
        self._metrics = self._log = self._events = None
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        try:
            other = ""
            with self.dist.agreed():
                if self.dist.is_main:
                    other = self._claim()
            if other := self.dist.broadcast_text(other):
                raise Busy(
                    f"checkpoint_path={self.directory}: another run ({other}) writes there; stop it"
                    " or give another run_name"
                )
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state = self._status.state if self._status is not None else ""
        if error is not None and state not in FINAL:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            # if another rank failed first, its error is the cause
            cause = self.dist.watch.cause if self.dist.watch is not None else None
            reason = cause.text if cause else f"{type(error).__name__}: {error}".rstrip(": ")
            self.mark(state, reason[:500])
        # whoever asked to stop will not wait long, and neither do the other ranks of a failed run
        failed_together = error is not None and self.dist.world_size > 1
        self.close(error is None, hurry=state in ("stopped", "requeue") or failed_together)

    def _claim(self) -> str:
        """Locks the directory before anything in it is read. Returns who else has it, or ""."""
        folders.refuse_links(self.directory)
        if self._evaluates:
            return ""
        folders.refuse_inside(self.directory)
        folders.refuse_foreign(self.directory)
        locked = self._lock.acquire()
        return other_writer(self.directory) or ("" if locked else "which has just begun")

    def _fail(self, cause: str = "", exit_status: int | None = None) -> None:
        if self._status is not None and self._status.state not in FINAL:
            self.mark("failed", cause, exit_status=exit_status)
            self._finish_report(0.0)

    def _report(self, name: str, text: str) -> None:
        """Reports trouble with a file; only the terminal can tell about log.txt."""
        (self._print if name == "log.txt" else self.say)(text)


def _strict(value: Any) -> float | int | None:
    """The number, or None for NaN and infinities, which strict JSON lacks."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
