"""`status.json`: whether a run is going on and how it ended, for people and for scripts that
restart it.

It is a file because launchers lose exit statuses: torchrun and mpirun return 1 whatever their ranks
returned. A run renews it every few seconds, because a host that goes down cannot say so.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import ROOT, read_row, write_whole
from utils.ranks.connection import closed_in_children
from utils.rundir.append import Troubles

FILE = "status.json"
# a batch script does not know the run's directory: it sets this variable to the path of a file, and
# reads there how the run ended
COPY = "LOCKSTEP_STATUS"
# success; asked to stop; asked to stop and be restarted; an error
FINAL = ("finished", "stopped", "requeue", "failed")
BEAT_S = 10.0
LOOK_AGAIN_S = 1.0
FRESH_S = 60.0  # a silent host is taken to have died after this time

FULL = (errno.ENOSPC, errno.EDQUOT)
KILLED = "killed (by SIGKILL, as when memory runs out), or ended by its launcher with another rank"
# Waits until the run's process is gone, whatever ended it. A process that was killed has not
# written how it ended, so the witness does, and draws the report page for the last time.
WITNESS = r"""
trap '' INT TERM HUP
file=$1 writer=$2 reason=$3 aside=$4 root=$5
shift 5
cat >/dev/null
grep -q '"state": "running"' "$file" && grep -q "\"writer\": \"$writer\"" "$file" || exit 0
sed -e 's/"state": "running"/"state": "failed"/' \
    -e "s/\"reason\": \"\"/\"reason\": \"$reason\"/" "$file" >"$aside" && mv "$aside" "$file"
[ $# = 0 ] || { cd "$root" && exec "$@"; }
"""


class Status:
    """The state of one run, kept in its directory as long as that belongs to the run."""

    def __init__(self, directory: Path, troubles: Troubles) -> None:
        self.state = ""
        self._directory, self._path, self._troubles = directory, directory / FILE, troubles
        self._writer, self._former = uuid.uuid4().hex, read_row(self._path).get("writer")
        self._row: dict[str, Any] = {}
        self._taken = ""
        # the failure watch writes too, from a thread of its own
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._lifeline: socket.socket | None = None
        self._witness: subprocess.Popen[bytes] | None = None
        # held open, so that a folder that replaces it has another inode, on network disks too
        self._folder: int | None = os.open(
            directory, os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
        )

    def write(self, state: str, reason: str, step: int | None, exit_status: int | None) -> None:
        """Replaces the file. `self.state` changes even if the disk refuses the file."""
        with self._troubles.writing(FILE), self._lock:
            self.state = state
            pid = os.getpid()
            self._row = {
                "state": state,
                "reason": " ".join(reason.split()),
                "step": step,
                "exit_status": exit_status,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "heartbeat": time.time(),
                "host": socket.gethostname(),
                "pid": pid,
                "process_began": _began(pid),
                "launch": _launch(),
                "writer": self._writer,
            }
            self._publish()
            if copy := os.environ.get(COPY):
                write_whole(Path(copy), self._text())

    def keep_alive(self, step: Callable[[], int | None], afterwards: Sequence[str] = ()) -> None:
        """Renews the heartbeat from a thread, and starts a small process that outlives this one: if
        this one is killed, it writes so and runs the command `afterwards`.
        """
        threading.Thread(target=self._beat, args=(step,), name="heartbeat", daemon=True).start()
        self._call_witness(afterwards)

    def _call_witness(self, afterwards: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        closed_in_children(ours)
        self._lifeline = ours  # closes when this process ends
        aside = self._path.with_name(f".{FILE}.witness")
        facts = [str(self._path), self._writer, KILLED, str(aside), str(ROOT), *afterwards]
        nowhere = subprocess.DEVNULL
        with suppress(OSError):  # without a shell, or room for a process, nobody is the witness
            self._witness = subprocess.Popen(
                ["/bin/sh", "-c", WITNESS, "witness", *facts],
                stdin=theirs.fileno(),
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,  # launchers kill the process groups of their ranks
            )
        theirs.close()

    def _beat(self, step: Callable[[], int | None]) -> None:
        while not self._closed.wait(BEAT_S):
            with self._troubles.writing(FILE), self._lock:
                if self.state == "running":
                    self._row |= {"heartbeat": time.time(), "step": step()}
                    self._publish()

    def lost(self) -> str:
        """Returns why the directory no longer belongs to this run, or an empty string."""
        if self._folder is None:
            return ""
        if not self._is_there():
            # network disks lose a folder for a moment when their server starts again
            time.sleep(LOOK_AGAIN_S)
            if not self._is_there():
                return (
                    "deleted or moved while the run was going on; put back, it goes on when it is"
                    " started again"
                )
        return self._taken

    def _is_there(self) -> bool:
        if self._folder is None:
            return True
        try:
            return os.path.samestat(os.stat(self._directory), os.fstat(self._folder))
        except OSError as error:  # a disk that does not answer has lost nothing
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def close(self) -> None:
        """Stops writing."""
        self._closed.set()
        with self._lock:
            if self._folder is not None:
                os.close(self._folder)
            self._folder = None
        if self._witness is not None:
            self._witness.kill()
            self._witness.wait()
        if self._lifeline is not None:
            self._lifeline.close()

    def _publish(self) -> None:
        if self._folder is None or self.lost():
            return
        now = read_row(self._path)
        if now and now.get("writer") not in (self._writer, self._former):
            self._taken = (
                f"another run ({_name(now)}) has taken it over; give one of them another run_name"
            )
            return
        try:
            write_whole(self._path, self._text())
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._overwrite()

    def _overwrite(self) -> None:
        """Writes in place: a full disk still has room in the blocks of the file itself."""
        with open(self._path, "r+b", buffering=0) as file:
            text = self._text().encode().ljust(os.fstat(file.fileno()).st_size)
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _text(self) -> str:
        return json.dumps(self._row, indent=1) + "\n"


def state_of(directory: Path) -> str:
    """Returns the state in status.json, or an empty string if it cannot be read."""
    return str(read_row(directory / FILE).get("state", ""))


def started_again(directory: Path) -> bool:
    """Returns whether a launcher started this process in place of one that ran here before."""
    row, now = read_row(directory / FILE), _launch()
    then = row.get("launch")
    if not isinstance(then, dict):
        return False

    def same(*keys: str) -> bool:
        return all(now[key] and then.get(key) == now[key] for key in keys)

    if row.get("host") == socket.gethostname():
        torchrun = same("parent", "parent_began")
    else:
        # the first rank has moved to another host, where torchrun is another process; "none" is
        # the id of every run without a name
        torchrun = same("torchrun_run") and now["torchrun_run"] != "none"
    return bool(
        (now["torchrun_restarts"] and torchrun) or (now["slurm_restarts"] and same("slurm_job"))
    )


def other_writer(directory: Path, remark: Callable[[str], None] = lambda text: None) -> str:
    """Returns `pid 123 on host x` if another live process seems to write there, else "".

    Calls `remark` about a run on another host that never wrote how it ended and is taken to have
    died.
    """
    row = read_row(directory / FILE)
    if row.get("state") != "running":
        return ""
    if row.get("host") == socket.gethostname():
        pid, began = row.get("pid"), row.get("process_began")
        alive = (
            isinstance(pid, int)
            and pid != os.getpid()
            and began is not None
            and began == _began(pid)
        )
        return _name(row) if alive else ""
    beat = row.get("heartbeat")
    if not isinstance(beat, int | float) or abs(beat) > 1e12:
        return ""
    age = time.time() - beat  # less than 0 where the clocks of the hosts differ
    if abs(age) < FRESH_S:
        heard = f"last heard of {max(0.0, age):.0f} s ago; given up after {FRESH_S:.0f} s"
        return "" if started_again(directory) else f"{_name(row)}, {heard}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(beat))
    remark(
        f"another run was writing here ({_name(row)}), last heard of {when} by its clock; taken to"
        " have died"
    )
    return ""


def _launch() -> dict[str, Any]:
    """Returns what stays the same when a launcher restarts its processes, and the number of
    restarts.
    """
    parent, env = os.getppid(), os.environ
    return {
        "parent": parent,
        "parent_began": _began(parent),
        "slurm_job": env.get("SLURM_JOB_ID", ""),
        "torchrun_run": env.get("TORCHELASTIC_RUN_ID", ""),
        "torchrun_restarts": _count(env, "TORCHELASTIC_RESTART_COUNT"),
        "slurm_restarts": _count(env, "SLURM_RESTART_COUNT"),
    }


def _count(env: Mapping[str, str], key: str) -> int:
    return int(env[key]) if env.get(key, "").isdecimal() else 0


def _name(row: Mapping[str, Any]) -> str:
    return f"pid {row.get('pid')} on host {row.get('host')}"


def _began(pid: int) -> int | None:
    """Returns when a process began, in kernel ticks, or None if it is gone: pids are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
