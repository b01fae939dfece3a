"""The run directory: what a run writes, and what it says. Rank 0 writes; everywhere else every method does nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from utils import revision
from utils.errors import ConfigError, RunError, Stopped
from utils.files import write_whole
from utils.ranks.distributed import Dist
from utils.ranks.signals import STATUS
from utils.rundir import folders
from utils.rundir.append import Lines, Troubles, keep_rows
from utils.rundir.lock import Lock
from utils.rundir.progress import ProgressBar
from utils.rundir.status import FINAL, Heartbeat, Status, other_writer, silent_writer, state_of
from utils.rundir.wandb_log import Tracker, check_mode


class Run:
    """Directory, log, metrics, status, W&B and progress bar of one job. `with run:` has the directory for this process alone."""

    def __init__(self, directory: Path, dist: Dist, evaluates: bool = False) -> None:
        """An evaluation takes a directory of its own, which has its name once the run has begun."""
        self.directory = directory if directory.name not in ("", "..") else Path(os.path.abspath(directory))
        self.dist, self._evaluates = dist, evaluates
        self._lock = Lock(self.directory)
        self._bar = ProgressBar(launcher=dist.launcher) if dist.is_main else None
        self._tracker = Tracker(self.say, dist.timeout_s / 2)
        self._troubles = Troubles(self._report)
        self._status: Status | None = None
        self._heartbeat: Heartbeat | None = None
        self._metrics: Lines | None = None
        self._log: Lines | None = None
        self._early: list[str] = []  # said before there was a log
        self._step: int | None = None

    @property
    def wandb_id(self) -> str | None:
        """What continues this run at W&B, handed to `begin` as the setting `id`."""
        return self._tracker.run_id

    def begin(self, config_text: str, wandb_settings: Mapping[str, Any], resumed: int | None = None, evaluation_due: bool = False) -> None:
        """Make the directory on rank 0, moving a former run aside, or continue the one there at a step; nothing is written before."""
        check_mode(str(wandb_settings.get("mode", "auto")))  # on all ranks alike, before rank 0 writes anything
        with self.dist.agreed():
            if self.dist.is_main:
                self._begin(config_text, wandb_settings, resumed, evaluation_due)
        self.directory = Path(self.dist.broadcast_text(str(self.directory)))

    def _begin(self, config_text: str, wandb_settings: Mapping[str, Any], resumed: int | None, evaluation_due: bool) -> None:
        moved = ""
        if self._evaluates:
            self.directory = folders.make_another(self.directory)
        else:
            self._refuse_other_writer()  # again, for one on a host that our lock does not reach
            moved = folders.make(self.directory, move=resumed is None)
        folders.check_files(self.directory)
        try:
            write_whole(self.directory / "config.yaml", config_text)
            if resumed is not None:
                keep_rows(self.directory / "metrics.jsonl", resumed, evaluation_due)
            self._metrics = Lines(self.directory / "metrics.jsonl", self._troubles)
            self._log = Lines(self.directory / "log.txt", self._troubles)
            self._status = Status(self.directory)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_path={self.directory}: cannot be written ({error.strerror}); give a folder you may write to, with room in it"
            ) from None
        self._step = resumed
        while self._early:
            self._note(self._early.pop(0))
        self.mark("running")
        self._heartbeat = Heartbeat(self._renew)
        if self.dist.watch is not None:  # it ends the process where the main thread cannot
            self.dist.watch.last_words[:] = [self._last_word]
        if moved:
            self.say(f"the former run of this name is now {moved}")
        if resumed is not None:
            self.say(f"continued at step {resumed}")
        self._record_code()
        name, project = wandb_settings.get("name") or self.directory.name, wandb_settings.get("project")
        mode, run_id = str(wandb_settings.get("mode", "auto")), wandb_settings.get("id")
        self._tracker.start(self.directory, config_text, mode, project, name, run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the same to W&B."""
        if self._metrics is None:
            return
        self._step = step
        row = {"step": step, "time": round(time.time(), 3), **{name: _strict(value) for name, value in metrics.items()}}
        self._metrics.write(json.dumps(row, allow_nan=False))
        self._tracker.log(step, metrics)

    def say(self, text: str) -> None:
        """A line to the terminal and to log.txt."""
        self._show(text)
        if self._status is None and self.dist.is_main:
            self._early.append(text)
        self._note(text)

    def _note(self, text: str) -> None:
        if (log := self._log) is not None:  # another thread may speak while this one closes
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    def progress(
        self, step: int, total: int, loss: float | None, headline_name: str, headline_value: float | None, examples_per_s: float | None
    ) -> None:
        """Move the progress bar; None stands for a value that is not known yet."""
        if self._bar is not None:
            self._bar.update(step, total, loss, (headline_name, headline_value), examples_per_s)

    def mark(self, state: str, reason: str = "", step: int | None = None, exit_status: int | None = None) -> None:
        """Write status.json: `running`, `finished`, `stopped`, `requeue` or `failed`; the step is the last one logged if not given."""
        if (status := self._status) is not None:
            self._tell(lambda: status.write(state, reason, self._step if step is None else step, exit_status))

    def lost(self) -> str:
        """What to tell the user where the directory is no longer this run's, as rank 0 sees it; empty as long as it is."""
        if self._status is None or not (why := self._status.lost()):
            return ""
        return f"checkpoint_path={self.directory}: {why}"

    def finish(self, step: int) -> None:
        """Say on all ranks that the run has come to its good end, unless what it has made is not there."""
        with self.dist.agreed():
            if lost := self.lost():
                raise RunError(lost)
        self.say(f"files: {self.directory}")
        self.mark("finished", step=step, exit_status=0)

    def confirm_finished(self, step: int) -> None:
        """Have status.json say so, where a crash after the last checkpoint has kept it from that."""
        if self.dist.is_main and state_of(self.directory) != "finished":
            self._status = Status(self.directory)
            self.mark("finished", step=step, exit_status=0)

    def stop(self, signum: int, step: int, hint: str) -> NoReturn:
        """End a run because it was asked to; status.json says why, since launchers lose exit statuses. The hint says what comes next."""
        name, again = signal.Signals(signum).name, signum == signal.SIGUSR1
        message = f"{name} after step {step:,}: {'to be run again' if again else 'stopped'}; {hint}"
        self.mark("requeue" if again else "stopped", message, step, STATUS[signum])
        self.close(hurry=True)
        raise Stopped(signum, message)

    def close(self, ok: bool = True, hurry: bool = False) -> None:
        """End the run, well or failed; more than once does no harm. In a hurry W&B gets seconds only."""
        if self.dist.watch is not None:
            self.dist.watch.last_words.clear()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if not ok and self._status is not None and self._status.state not in FINAL:
            self.mark("failed")
        if self._bar is not None:
            self._bar.close()
        self._tracker.close(ok, hurry)
        for file in (self._metrics, self._log, self._status):
            if file is not None:
                file.close()
        self._metrics = self._log = None
        self._lock.release()

    def __enter__(self) -> Run:
        try:
            with self.dist.agreed():
                if self.dist.is_main:
                    self._claim()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        state = self._status.state if self._status is not None else ""
        if error is not None and state not in FINAL:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            known = self.dist.watch.cause if self.dist.watch is not None else None  # else what another rank's end did here would be told
            self.mark(state, (known.text if known else f"{type(error).__name__}: {error}".rstrip(": "))[:500])
        # whoever asked to stop will not wait long, nor do other ranks that have failed with this one
        self.close(ok=error is None, hurry=state in ("stopped", "requeue") or (error is not None and self.dist.world_size > 1))

    def _claim(self) -> None:
        """Before anything there is read: what is read while another run writes is not what will be there."""
        if self._evaluates:
            folders.refuse_checkpoints(self.directory)
            return
        folders.refuse_inside(self.directory)
        if holder := self._lock.acquire():
            self._refuse(holder)
        self._refuse_other_writer()
        if remark := silent_writer(self.directory):
            self.say(remark)

    def _refuse_other_writer(self) -> None:
        if other := other_writer(self.directory):
            self._refuse(other)

    def _refuse(self, other: str) -> NoReturn:
        raise ConfigError(f"checkpoint_path={self.directory}: another run ({other}) writes there; stop it or give another run_name")

    def _renew(self) -> None:
        if (status := self._status) is not None:
            self._tell(lambda: status.renew(self._step))

    def _tell(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._troubles.failed("status.json", error)
        else:
            self._troubles.worked("status.json")

    def _last_word(self, cause: str) -> None:
        if self._status is not None and self._status.state not in FINAL:
            self.mark("failed", cause, exit_status=1)

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.say(text)

    def _report(self, name: str, text: str) -> None:
        """Trouble with a file; of log.txt only the terminal can tell."""
        (self._show if name == "log.txt" else self.say)(text)

    def _record_code(self) -> None:
        """git.txt and uncommitted.diff; those of other code that this run has begun with are kept beside them."""
        if not (summary := revision.summary()):
            return
        texts = {"git.txt": summary, "uncommitted.diff": revision.uncommitted()}
        try:
            before = {name: _read(self.directory / name) for name in texts}
            if before["git.txt"] and _code(before) != _code(texts):
                self.say(f"the code has changed since this run was here before; what it was then is in {self._keep_old(list(texts))}")
            for name, text in texts.items():
                write_whole(self.directory / name, text)
        except OSError as error:
            self._troubles.failed("git.txt", error)

    def _keep_old(self, names: list[str]) -> str:
        paths = [self.directory / name for name in names]
        number = 1
        while any(_numbered(path, number).exists() for path in paths):
            number += 1
        for path in paths:
            if path.exists():
                path.rename(_numbered(path, number))
        return _numbered(paths[0], number).name


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""


def _code(texts: Mapping[str, str]) -> tuple[str, list[str]]:
    """Revision and changes; the names of files that git does not know come and go."""
    changes = [line for line in texts["uncommitted.diff"].splitlines() if not line.startswith("# untracked: ")]
    return texts["git.txt"].partition("\n")[0], changes


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.old-{number}{path.suffix}")


def _strict(value: Any) -> float | int | None:
    """A number as strict JSON knows it; NaN and the infinities it does not."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
