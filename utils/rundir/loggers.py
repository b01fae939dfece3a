"""Sends what a run logs to services beside its own files. If one fails, the run goes on."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.errors import brief
from utils.rundir.records import read_config
from utils.rundir.services import Logger, RunInfo, Say, TensorBoard, Trackio
from utils.rundir.wandb_log import WandB, resolve_mode

FINISH_S = 30.0
FAILURES = (Exception, SystemExit)  # a service may try to end the program
HURRY_S = 3.0  # a preempted run has little time, and a checkpoint to write

LOGGERS: Mapping[str, type[Logger]] = {
    "wandb": WandB,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}


class Loggers:
    """The loggers of a run. One that fails is reported once, and off from then on."""

    def __init__(self, say: Say, patience_s: float) -> None:
        """`patience_s` bounds the time of `close`, because other ranks wait for this one."""
        self._say, self._patience_s = say, patience_s
        self._open: dict[str, Logger] = {}

    def start(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        resumed: int | None,
        facts: Mapping[str, Any],
    ) -> str | None:
        """Begins or continues this run in each of the services that the setting `log` names.

        Other settings are its `project` and `name`, and for W&B a `mode` and the `id` of a run to
        continue. `facts` are in its config beside the run's keys. Returns the id of the W&B run,
        for a later start, even if W&B is off or fails now.
        """
        names, wandb_id = settings.get("log", ["wandb"]), settings.get("id")
        mode = resolve_mode(settings.get("mode", "auto"), os.environ)
        if mode == "disabled":
            names = [name for name in names if name != "wandb"]
        if "wandb" in names:
            wandb_id = wandb_id or secrets.token_hex(5)
        config = {**read_config(directory), **facts}
        project, run_name = settings.get("project"), settings.get("name")
        run = RunInfo(directory, project, run_name, config, resumed, wandb_id, mode)
        for name in names:
            kind = LOGGERS[name]
            try:
                self._open[kind.about] = kind(run, self._say)
            except ImportError as error:
                self._say(f"{kind.about}: not installed ({brief(error)}); pip install {name}")
            except FAILURES as error:  # of any kind: it is not what the run is about
                self._say(f"{kind.about}: could not start ({brief(error)}); off for this run")
        return wandb_id

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Sends a row. Services keep the steps that they saw before a run was continued."""
        self._each(lambda logger: logger.log(step, row))

    def show(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Sends the files of an evaluated set."""
        self._each(lambda logger: logger.show(step, set_name, files))

    def close(self, ok: bool, hurry: bool = False) -> None:
        """Ends the run as finished or failed, within a bounded time."""
        within = min(HURRY_S if hurry else FINISH_S, self._patience_s)

        def finish(about: str, logger: Logger) -> None:
            try:
                logger.finish(ok)
            except FAILURES as error:
                self._say(f"{about}: could not finish ({brief(error)})")

        ends = {
            about: threading.Thread(target=finish, args=(about, logger), daemon=True)
            for about, logger in self._open.items()
        }
        self._open = {}
        for end in ends.values():
            end.start()
        deadline = time.monotonic() + within
        for about, end in ends.items():
            end.join(max(0.0, deadline - time.monotonic()))
            if end.is_alive():
                sync = "; `wandb sync` uploads what its files hold" * (about == "W&B")
                self._say(f"{about}: did not finish within {within:g} s{sync}")

    def _each(self, send: Callable[[Logger], None]) -> None:
        for about, logger in list(self._open.items()):
            try:
                send(logger)
            except FAILURES as error:
                del self._open[about]
                self._say(f"{about}: could not log ({brief(error)}); off for this run")
