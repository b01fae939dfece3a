"""Weights & Biases as a guest: it never prompts, never holds up a step and never fails a run.

A process of its own copies metrics.jsonl to W&B, because W&B may hang in any call, takes a second
to start (18 s if no server answers), and starts a process that keeps open whatever it inherits.
This way it inherits nothing from the run, no step waits for it, and one kill at the run's end stops
all of it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import ConfigError, brief
from utils.files import ROOT
from utils.ranks.connection import closed_in_children

MODES = ("auto", "online", "offline", "disabled")
FINISH_S = 30.0
# a preempted run has little time, and a checkpoint to write; after a killed run, W&B's process
# lives no longer than this
HURRY_S = 3.0
POLL_S = 0.5
MOST_PICTURES = 20  # uploaded for each evaluation
# W&B prints nothing, captures neither code nor console, and measures no system metrics. It reports
# no errors to its makers, which without a network would delay the end of the run.
QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_JOB_CREATION": "true",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_X_DISABLE_META": "true",
    "WANDB_X_SAVE_REQUIREMENTS": "false",
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "5",
    "WANDB_INIT_TIMEOUT": "15",
    "WANDB_ERROR_REPORTING": "false",
}


def resolve_mode(mode: str, env: Mapping[str, str]) -> str:
    """Checks the mode. `auto` becomes what W&B's environment variables name, if anything."""
    if mode not in MODES:
        raise ConfigError(f"wandb.mode={mode}: choose one of {', '.join(MODES)}")
    named = {"dryrun": "offline", "run": "online"}.get(
        env.get("WANDB_MODE", ""), env.get("WANDB_MODE", "")
    )
    if env.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        named = "disabled"
    return named if mode == "auto" and named in MODES else mode


class Tracker:
    """One W&B run, or none, as the training process sees it."""

    def __init__(self, say: Callable[[str], None], patience_s: float) -> None:
        """`patience_s` bounds the time of `close`, because other ranks wait for this one."""
        # continues the W&B run; kept for a later start even if W&B is off or fails now
        self.run_id: str | None = None
        self._say, self._patience_s = say, patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket

    def start(
        self, directory: Path, mode: str, run_id: str | None, project: str | None, name: str | None
    ) -> None:
        """Begins a W&B run, or continues the one of that id, with the rows written from now on."""
        self.run_id = run_id
        if mode == "disabled":
            return
        self.run_id = run_id or secrets.token_hex(5)
        folder, null = str(directory.absolute()), subprocess.DEVNULL
        # W&B's own process logs to its cache, which would be under the home directory.
        env = {"WANDB_CACHE_DIR": folder, **os.environ, **QUIET}
        self._socket, theirs = socket.socketpair()
        # a loader process would keep W&B's from seeing that the run has died
        closed_in_children(self._socket)
        try:
            begin = (directory / "metrics.jsonl").stat().st_size
            given = json.dumps(
                {
                    "mode": mode,
                    "begin": begin,
                    "dir": folder,
                    "id": self.run_id,
                    "project": project,
                    "name": name,
                }
            )
            command = [sys.executable, "-m", "utils.rundir.wandb_log", given]
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=null,
                stderr=null,
                cwd=ROOT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self._say(f"W&B: could not start ({brief(error)}); off for this run")
        theirs.close()

    def report(self) -> None:
        """Prints what W&B's process has sent, and forgets the process once it has ended."""
        if self._process is None:
            return
        status = self._process.poll()
        with suppress(OSError):  # nothing is there to read
            for line in (
                self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
                .decode(errors="replace")
                .splitlines()
            ):
                self._say(f"W&B: {line}")
        if status is not None:
            self._process = None
            self._socket.close()
            if status:
                self._say(f"W&B: its process ended with status {status}; off for this run")

    def close(self, ok: bool, hurry: bool = False) -> None:
        """Ends the run as finished or failed with all processes of W&B, within a bounded time."""
        if (process := self._process) is None:
            return
        within = min(HURRY_S if hurry else FINISH_S, self._patience_s)
        with suppress(OSError, subprocess.TimeoutExpired):
            self._socket.send(b"0" if ok else b"1")
            process.wait(within)
        self.report()
        if self._process is not None:
            self._process = None
            os.killpg(process.pid, signal.SIGKILL)
            self._socket.close()
            with suppress(
                subprocess.TimeoutExpired
            ):  # a kill does not end a process that waits for a disk
                process.wait(1)
            self._say(
                f"W&B: did not finish within {within:g} s and was ended; `wandb sync` uploads what"
                " its files hold"
            )


class InOurGroup(subprocess.Popen):
    """Keeps W&B's service in our process group, so that one kill reaches it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{**named, "start_new_session": False})


def main() -> None:
    """Runs W&B's process."""
    given, status, ended = json.loads(sys.argv[1]), [1], threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # schedulers send them to all processes; the run handles them, and this process ends with it
        signal.signal(signum, signal.SIG_IGN)
    subprocess.Popen = InOurGroup  # type: ignore[misc]
    threading.Thread(target=wait_for_end, args=(status, ended), daemon=True).start()
    what = "could not start"
    try:
        with open(Path(given["dir"], "metrics.jsonl"), "rb", buffering=0) as rows:
            rows.seek(given["begin"])
            run = begin(given)
            what, last = "could not log", False
            while not last:
                last = ended.wait(POLL_S)
                copy(rows, run, Path(given["dir"]))
        what = "could not finish"
        run.finish(exit_code=status[0])
    except Exception as error:
        os.write(0, f"{what} ({brief(error)}); off for this run\n".encode())
    with suppress(BaseException):
        sys.modules["wandb"].teardown()


def wait_for_end(status: list[int], ended: threading.Event) -> None:
    """Waits for the run's exit status, then ends this process if W&B does not.

    A killed run sends nothing; this process must not outlive it either.
    """
    status[0] = int(os.read(0, 1) or 1)
    ended.set()
    os.read(0, 1)  # returns when the run's process is gone
    time.sleep(HURRY_S)
    os.killpg(0, signal.SIGKILL)


def begin(given: Mapping[str, Any]) -> Any:
    """Starts a W&B run; records offline where it cannot start online."""
    import wandb
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.load(Path(given["dir"], "config.yaml")))
    named = {key: given[key] for key in ("dir", "id", "project", "name")}
    if given["mode"] != "offline":
        try:
            return wandb.init(mode="online", config=config, resume="allow", **named)
        except Exception as error:
            wandb.teardown()  # otherwise the online and offline runs conflict
            # a UsageError means that there are no credentials
            if given["mode"] == "online" or not isinstance(error, wandb.errors.UsageError):
                os.write(
                    0,
                    f"could not start ({brief(error)}); recording offline, `wandb sync` uploads"
                    " it\n".encode(),
                )
    return wandb.init(mode="offline", config=config, resume="allow", **named)


def copy(rows: BinaryIO, run: Any, directory: Path) -> None:
    """Logs the new complete lines. W&B keeps the steps it saw before a run was continued."""
    place, data = rows.tell(), rows.read()
    lines = data[: data.rfind(b"\n") + 1]  # a full disk takes half a line, which is taken back
    rows.seek(place + len(lines))
    for row in map(json.loads, lines.splitlines()):
        step, _ = row.pop("step"), row.pop("time")
        values = {name: math.nan if value is None else value for name, value in row.items()}
        # an evaluation's pictures are written before its row
        if any(name.startswith("eval/") for name in values):
            values |= pictures(directory / "evaluations" / f"step_{step}")
        run.log(values, step=step)


def pictures(folder: Path) -> dict[str, Any]:
    """Returns the PNG files of an evaluation, by set and name; unreadable ones are left out."""
    import wandb

    images = {}
    for file in sorted(folder.glob("*/*.png"))[:MOST_PICTURES]:
        with suppress(OSError, ValueError):
            images[f"pictures/{file.parent.name}/{file.stem}"] = wandb.Image(str(file))
    return images


if __name__ == "__main__":
    main()
