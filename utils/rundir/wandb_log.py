"""Weights & Biases as a guest: it never prompts, never blocks for long and never fails a run."""

from __future__ import annotations

import contextlib
import netrc
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from utils.errors import ConfigError, brief

MODES = ("auto", "online", "offline", "disabled")
INIT_S, FINISH_S = 15.0, 30.0
START_S = INIT_S + 5.0  # for W&B to notice by itself
ONLINE_SHARE = 0.6  # of the time that others wait for this rank; the rest is for going offline where the network does not answer
HURRY_S = 3.0  # a job that is preempted has little time, and a checkpoint to write in it
STALL_S, LEAVE_S = 30.0, 3.0
QUEUE = 4096  # rows
# Nothing of W&B's own on the terminal, no capture of code or console, no system metrics.
QUIET: dict[str, Any] = {
    "silent": True, "quiet": True, "console": "off", "disable_code": True, "disable_git": True, "save_code": False,
    "disable_job_creation": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False,
    "x_transaction_log_flush_interval": 5.0, "init_timeout": INIT_S, "login_timeout": INIT_S, "finish_timeout": FINISH_S,
}  # fmt: skip


def check_mode(mode: str) -> str:
    """The mode, if it is one."""
    if mode not in MODES:
        raise ConfigError(f"wandb.mode={mode}: choose one of {', '.join(MODES)}")
    return mode


def resolve_mode(mode: str, env: Mapping[str, str]) -> tuple[str, str]:
    """`online`, `offline` or `disabled`, and a remark for the user where it is not what was asked for."""
    if check_mode(mode) == "auto":
        asked = {"dryrun": "offline", "run": "online"}.get(env.get("WANDB_MODE", ""), env.get("WANDB_MODE", ""))
        if env.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
            asked = "disabled"
        if asked not in MODES[1:]:
            return ("online" if has_credentials(env) else "offline"), ""
        mode = asked
    if mode == "online" and not has_credentials(env):
        return "offline", "W&B: online was asked for, but no credentials are here (run `wandb login`); recording offline"
    return mode, ""


def has_credentials(env: Mapping[str, str]) -> bool:
    """Whether W&B would find a key without asking: the variable, or a netrc entry for its host."""
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(env.get("HOME", "~")).expanduser()
    for file in [Path(env["NETRC"])] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]:
        try:
            if host in netrc.netrc(str(file)).hosts:
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


class Tracker:
    """One W&B run, or none. The first failure is said once and ends it; the training goes on.

    A thread of its own talks to W&B: a network that stalls, or W&B's own process when it hangs, must not hold up the steps.
    """

    def __init__(self, say: Callable[[str], None], patience_s: float) -> None:
        """Nothing takes longer than `patience_s`: other ranks wait for this one, and not for ever."""
        self._say, self._patience_s = say, patience_s
        self._worker: _Worker | None = None
        self._run_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """W&B's name for the run, by which a later job continues it; kept where W&B is off or fails, for the job after that."""
        return self._run_id

    def start(self, directory: Path, config_text: str, mode: str, project: str | None, name: str | None, run_id: str | None = None) -> None:
        """Open a run whose files live under the run directory, or go on with the one of that id."""
        self._run_id = run_id
        mode, remark = resolve_mode(mode, os.environ)
        if remark:
            self._say(remark)
        if mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")  # its log-in speaks before it has seen the settings
        try:
            import wandb  # here and not in the thread: on a slow disk this may take longer than W&B is given to start
        except ImportError:
            return self._say("W&B: the package is not installed; off for this run (pip install wandb, or set wandb.mode=disabled)")
        except Exception as error:
            return self._say(f"W&B: could not start ({brief(error)}); off for this run")
        settings = {"mode": mode, "project": project, "name": name, "dir": str(directory)}
        if run_id:
            settings |= {"id": run_id, "resume": "allow"}
        deadline = time.monotonic() + self._patience_s
        why = self._open(wandb, settings, config_text, min(START_S, self._patience_s * (ONLINE_SHARE if mode == "online" else 1.0)))
        if why and mode == "online":
            self._say(f"W&B: {why}; recording offline, `wandb sync` uploads it")
            left = max(0.0, deadline - time.monotonic())
            why = self._open(wandb, settings | {"mode": "offline"}, config_text, min(START_S, left))
        if why:
            self._say(f"W&B: {why}; off for this run")

    def _open(self, wandb: Any, settings: Mapping[str, Any], config_text: str, within: float) -> str:
        """Start it in a thread of its own; empty, or why it did not come to be."""
        worker = _Worker(wandb)
        worker.open(settings, config_text)
        answered = worker.answered.wait(within)
        if answered and not worker.trouble:
            self._worker, self._run_id = worker, worker.run_id or self._run_id
            return ""
        _leave(worker)
        if settings["mode"] == "online":
            worker.join(min(LEAVE_S, within / 4))  # two of them would get in each other's way,
            worker.forsaken = True  # and one that comes to its end later must not end the other's
        return worker.trouble if answered else f"did not start within {within:g} s"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over one step's metrics; a step that W&B has seen before it was continued stays as it is there."""
        if self._worker is None:
            pass
        elif self._worker.trouble:
            self._drop(self._worker.trouble)
        elif self._worker.silent_s() > STALL_S:
            self._drop(f"has not answered for {STALL_S:g} s")
        elif not self._worker.log(step, dict(metrics)):
            self._drop(f"is {QUEUE} rows behind")

    def close(self, ok: bool, hurry: bool = False) -> None:
        """End the run as finished or failed, and W&B's own process with it; waits a bounded time."""
        if self._worker is None:
            return
        worker, self._worker, within = self._worker, None, min(HURRY_S if hurry else FINISH_S, self._patience_s)
        worker.finish(ok, within)
        if worker.trouble:
            self._say(f"W&B: {worker.trouble}; off for this run")
        elif worker.is_alive():
            self._say(f"W&B: did not finish within {within:g} s and is left behind; `wandb sync` uploads what its files hold")
        if worker.leave(0.0):
            _kill_service()

    def _drop(self, why: str) -> None:
        worker, self._worker = self._worker, None
        self._say(f"W&B: {why}; off for this run")
        if worker is not None:
            _leave(worker)


class _Worker(threading.Thread):
    """Talks to W&B, one call after the other in the order given, until it is told to finish or a call fails."""

    def __init__(self, wandb: Any) -> None:
        super().__init__(name="wandb", daemon=True)
        self.trouble = ""
        self.forsaken = False
        self.run_id: str | None = None
        self.answered = threading.Event()  # W&B has started, or has failed to
        self._calls: queue.Queue[tuple[str, Callable[[], object]] | None] = queue.Queue(QUEUE)
        self._since: float | None = None
        self._leaving = False
        self._wandb = wandb
        self._run: Any = None

    def open(self, settings: Mapping[str, Any], config_text: str) -> None:
        self._calls.put(("could not start", lambda: self._open(settings, config_text)))
        self.start()

    def log(self, step: int, metrics: dict[str, float]) -> bool:
        """False where too many wait already."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(("could not log", lambda: self._run.log(metrics, step=step)))
            return True
        return False

    def finish(self, ok: bool, within: float) -> None:
        """Ask for the end after all that was handed over, and wait for it."""
        deadline = time.monotonic() + within
        with contextlib.suppress(queue.Full):
            self._calls.put(("could not finish", lambda: self._run.finish(exit_code=0 if ok else 1)), timeout=within)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self.join(max(0.0, deadline - time.monotonic()))

    def leave(self, within: float) -> bool:
        """Have it end without what waits still, and wait for that; whether it has not."""
        self._leaving = True
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)  # where nothing waits, it does
        self.join(within)
        return self.is_alive()

    def silent_s(self) -> float:
        """How long the call in progress has taken."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def run(self) -> None:
        try:
            while (task := self._calls.get()) is not None and not self._leaving:
                what, call = task
                self._since = time.monotonic()
                call()
                self._since = None
                self.answered.set()
        except Exception as error:
            self.trouble = f"{what} ({brief(error)})"
        self.answered.set()
        with contextlib.suppress(Exception):
            if not self.forsaken:
                self._wandb.teardown()  # its own process would stay beside ours to the end

    def _open(self, given: Mapping[str, Any], config_text: str) -> None:
        from omegaconf import OmegaConf

        fields = self._wandb.Settings.model_fields  # which of them exist depends on W&B's version
        settings = self._wandb.Settings(**{key: value for key, value in QUIET.items() if key in fields})
        config: Any = OmegaConf.to_container(OmegaConf.create(config_text))
        with _logs_in(given["dir"]):
            self._run = self._wandb.init(config=config, settings=settings, **given)
        self.run_id = getattr(self._run, "id", None)


@contextlib.contextmanager
def _logs_in(directory: str) -> Iterator[None]:
    """W&B's own process logs to its cache, which would be under the home directory; it looks where that is as it starts."""
    if "WANDB_CACHE_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_CACHE_DIR"] = directory
    try:
        yield
    finally:
        os.environ.pop("WANDB_CACHE_DIR", None)


def _leave(worker: _Worker) -> None:
    if worker.leave(LEAVE_S if worker.trouble else 0.0):  # after an error it is about to end by itself
        _kill_service()


def _kill_service() -> None:
    """End W&B's own process where it hangs: it has our output open, and whoever reads that would wait for it."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"wandb-core"):
                    os.kill(int(pid), signal.SIGKILL)
