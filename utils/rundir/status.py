"""`status.json`: whether a run is going on and how it ended, for people and for scripts that
restart it.

It is a file because launchers lose exit statuses: torchrun and mpirun return 1 whatever their ranks
returned. The run alone writes it, and renews it every few seconds; readers infer from its process
and its silence that a run was killed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.files import read_row, write_whole
from utils.rundir.append import Troubles

STATUS_FILE = "status.json"
# a batch script does not know the run's directory: it sets this variable to the path of a file, and
# reads there how the run ended
STATUS_VARIABLE = "LOCKSTEP_STATUS"
# success; asked to stop; asked to stop and be restarted; an error
FINAL = ("finished", "stopped", "requeue", "failed")
LOST = "lost"  # what readers call a run that says `running` and is gone
BEAT_S = 10.0
FRESH_S = 60.0  # a silent host is taken to have died after this time


class Status:
    """The state of one run, kept in its directory as long as that belongs to the run."""

    def __init__(self, directory: Path, troubles: Troubles) -> None:
        self.state = ""
        self._directory, self._path, self._troubles = directory, directory / STATUS_FILE, troubles
        self._folder = os.stat(directory)
        self._row: dict[str, Any] = {}
        self._taken = ""
        # The main thread writes, the heartbeat, and the failure watch. The lock may be taken again
        # by the thread that has it.
        self._lock, self._closed = threading.RLock(), threading.Event()

    def write(self, state: str, reason: str, step: int | None, exit_status: int | None) -> None:
        """Replaces the file. `self.state` changes even if the disk refuses the file."""
        with self._troubles.writing(STATUS_FILE), self._lock:
            self.state = state
            self._row = {
                "state": state,
                "reason": " ".join(reason.split()),
                "step": step,
                "exit_status": exit_status,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "heartbeat": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_began": _began(os.getpid()),
                "launch": _launch(),
            }
            self._publish()
            if copy := os.environ.get(STATUS_VARIABLE):
                write_whole(Path(copy), self._text())

    def keep_alive(self, step: Callable[[], int | None]) -> None:
        """Renews the heartbeat from a thread, until `close`."""

        def beat() -> None:
            while not self._closed.wait(BEAT_S):
                with self._troubles.writing(STATUS_FILE), self._lock:
                    if self.state == "running":
                        self._row |= {"heartbeat": time.time(), "step": step()}
                        self._publish()

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def lost(self) -> str:
        """Returns why the directory no longer belongs to this run, or an empty string."""
        try:
            is_there = os.path.samestat(os.stat(self._directory), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:  # a disk that does not answer has lost nothing
            is_there = True
        if is_there:
            return self._taken
        what = "deleted or moved while the run was going on"
        return f"{what}; put it back and start the run again to continue"

    def close(self) -> None:
        with self._lock:
            self._closed.set()

    def _publish(self) -> None:
        if self._closed.is_set() or self.lost():
            return
        # hosts that no lock reaches may both have begun here: the later one has it
        now = read_row(self._path)
        if now.get("state") == "running" and not _is_ours(now) and is_alive(now):
            what = f"another run ({_name(now)}) has taken it over"
            self._taken = f"{what}; give one of them another run_name"
        else:
            write_whole(self._path, self._text())

    def _text(self) -> str:
        return json.dumps(self._row, indent=1) + "\n"


def state_of(directory: Path) -> str:
    """Returns the state in status.json, `lost` if a run that says `running` is gone, or an empty
    string if there is none.
    """
    row = read_row(directory / STATUS_FILE)
    state = str(row.get("state", ""))
    return LOST if state == "running" and not is_alive(row) else state


def confirm_finished(directory: Path, step: int, say: Callable[[str], None]) -> None:
    """Marks a run as finished that crashed after the checkpoint of its last step."""
    if state_of(directory) != "finished":
        Status(directory, Troubles(say)).write("finished", "", step, 0)


def is_alive(row: Mapping[str, Any]) -> bool:
    """True if the run that wrote a status is still running: on this host by its process, on others
    by its heartbeat.
    """
    pid, beat = row.get("pid"), row.get("heartbeat")
    if row.get("host") == socket.gethostname():
        return isinstance(pid, int) and _began(pid) == row.get("process_began") is not None
    # less than 0 where the clocks of the hosts differ
    return isinstance(beat, int | float) and abs(time.time() - beat) < FRESH_S


def other_writer(directory: Path) -> str:
    """Returns `pid 123 on host x` if another live process seems to write there, else "".

    For hosts that a lock does not reach. A run that its launcher has moved to this host is not
    another.
    """
    row = read_row(directory / STATUS_FILE)
    going_on = row.get("state") == "running" and is_alive(row) and not _is_ours(row)
    return _name(row) if going_on and not started_again(directory) else ""


def started_again(directory: Path) -> bool:
    """True if a launcher started this process in place of one that ran here before."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    if all(os.environ.get(count, "0") == "0" for count in counts):
        return False
    return read_row(directory / STATUS_FILE).get("launch") == _launch()


def _launch() -> str:
    """Returns what stays the same when a launcher restarts its processes."""
    job, run = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # "none" is the id of every torchrun without a name, which another host cannot tell apart
    return job or (run if run != "none" else f"{socket.gethostname()} {os.getppid()}")


def _is_ours(row: Mapping[str, Any]) -> bool:
    return (row.get("host"), row.get("pid")) == (socket.gethostname(), os.getpid())


def _name(row: Mapping[str, Any]) -> str:
    return f"pid {row.get('pid')} on host {row.get('host')}"


def _began(pid: int) -> int | None:
    """Returns when a process began, in kernel ticks, or None if it is gone: pids are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
