"""`status.json`: whether a run is going on and how it ended, for people and for scripts that start it again.

A file, because launchers swallow exit statuses: torchrun and mpirun answer 1 whatever their ranks said.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

FILE = "status.json"
FINAL = ("finished", "stopped", "requeue", "failed")  # well; asked to stop; asked to stop and be started again; an error
STATES = ("running", *FINAL)


class Status:
    """The state of one run, kept in its directory."""

    def __init__(self, directory: Path) -> None:
        self.state = ""
        self._path = directory / FILE
        self._lock = threading.Lock()  # a thread that watches the others may have the last word

    def write(self, state: str, reason: str, step: int | None, exit_status: int | None) -> None:
        """Replace the file; the state counts even where the disk takes no file."""
        assert state in STATES, state
        self.state = state
        pid = os.getpid()
        row = {
            "state": state, "reason": " ".join(reason.split()), "step": step, "exit_status": exit_status,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(), "pid": pid, "process_began": _began(pid), "launch": _launch(),
        }  # fmt: skip
        with self._lock:
            write_whole(self._path, json.dumps(row, indent=1) + "\n")


def state_of(directory: Path) -> str:
    """What the file says; nothing where there is none that can be read."""
    row = _row(directory)
    return str(row.get("state", "")) if isinstance(row, dict) else ""


def started_again(directory: Path) -> bool:
    """Whether a launcher has started this process in place of one that had begun the run in this directory."""
    launch, row = _launch(), _row(directory)
    restarted = launch["torchrun_restarts"] or launch["slurm_restarts"]
    if not restarted or not isinstance(row, dict) or not isinstance(row.get("launch"), dict):
        return False
    same = ("parent", "parent_began") if launch["torchrun_restarts"] else ("slurm_job",)
    return all(row["launch"].get(key) == launch[key] for key in same)


def other_writer(directory: Path) -> str:
    """`pid 123 on host x`, if a process of this host that is alive, and not this one, says that it runs there; else nothing."""
    try:
        row = _row(directory)
        pid, host, began = int(row["pid"]), row["host"], row["process_began"]
        running = row["state"] == "running"
    except (ValueError, KeyError, TypeError):
        return ""
    if not running or host != socket.gethostname() or pid == os.getpid() or began is None or began != _began(pid):
        return ""
    return f"pid {pid} on host {host}"


def _launch() -> dict[str, Any]:
    """What stays the same when a launcher starts its processes again, and how often it has."""
    parent, env = os.getppid(), os.environ
    return {
        "parent": parent, "parent_began": _began(parent), "slurm_job": env.get("SLURM_JOB_ID", ""),
        "torchrun_restarts": int(env.get("TORCHELASTIC_RESTART_COUNT") or 0), "slurm_restarts": int(env.get("SLURM_RESTART_COUNT") or 0),
    }  # fmt: skip


def _row(directory: Path) -> Any:
    try:
        return json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader, or a crash, finds the old text or the new one."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: pids are used again, a pid and its beginning are not. None: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
