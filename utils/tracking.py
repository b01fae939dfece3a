"""Weights & Biases as a guest: it never prompts, never blocks for long and never fails a run."""

from __future__ import annotations

import contextlib
import netrc
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from utils.errors import ConfigError

MODES = ("auto", "online", "offline", "disabled")
INIT_S, FINISH_S = 15.0, 30.0
# Nothing of W&B's own on the terminal, no capture of code or console, no system metrics.
QUIET: dict[str, Any] = {
    "silent": True, "quiet": True, "console": "off", "disable_code": True, "disable_git": True, "save_code": False,
    "disable_job_creation": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False,
    "init_timeout": INIT_S, "login_timeout": INIT_S, "finish_timeout": FINISH_S,
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
    """One W&B run, or none. The first failure is said once and ends it; the training goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wandb: Any = None
        self._run: Any = None

    def start(self, directory: Path, config_text: str, mode: str, project: str | None, name: str | None) -> None:
        """Open a run whose files live under the run directory."""
        mode, remark = resolve_mode(mode, os.environ)
        if remark:
            self._say(remark)
        if mode != "disabled":
            self._guard("could not start", lambda: self._open(directory, config_text, mode, project, name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over one step's metrics."""
        if self._run is not None:
            self._guard("could not log", lambda: self._run.log(dict(metrics), step=step))

    def close(self, ok: bool) -> None:
        """End the run as finished or failed, and W&B's own process with it; waits a bounded time."""
        if self._run is None:
            return
        run, wandb, self._run = self._run, self._wandb, None

        def finish() -> None:
            run.finish(exit_code=0 if ok else 1)
            wandb.teardown()

        worker = threading.Thread(target=lambda: self._guard("could not finish", finish), daemon=True)
        worker.start()
        worker.join(FINISH_S)
        if worker.is_alive():
            self._say(f"W&B: did not finish within {FINISH_S:g} s; its files are complete, `wandb sync` uploads them")

    def _open(self, directory: Path, config_text: str, mode: str, project: str | None, name: str | None) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # its log-in speaks before it has seen the settings
        import wandb
        from omegaconf import OmegaConf

        self._wandb = wandb
        fields = wandb.Settings.model_fields  # which of them exist depends on W&B's version
        settings = wandb.Settings(**{key: value for key, value in QUIET.items() if key in fields})
        config: Any = OmegaConf.to_container(OmegaConf.create(config_text))
        chosen: Any = mode
        self._run = wandb.init(project=project, name=name, dir=str(directory), mode=chosen, config=config, settings=settings)

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ImportError:
            self._drop("the package is not installed; off for this run (pip install wandb, or set wandb.mode=disabled)")
        except Exception as error:
            self._drop(f"{what} ({' '.join(str(error).split())[:120]}); off for this run")

    def _drop(self, why: str) -> None:
        self._run = None
        self._say(f"W&B: {why}")
        with contextlib.suppress(Exception):
            self._wandb.teardown()  # its own process would stay beside ours to the end
