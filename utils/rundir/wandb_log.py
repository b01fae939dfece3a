"""Weights & Biases as a guest: it never prompts and never fails a run."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils import revision
from utils.errors import brief
from utils.rundir.records import read_config

MODES = ("auto", "online", "offline", "disabled")
INIT_S = 15.0
FINISH_S = 30.0
HURRY_S = 3.0  # a preempted run has little time, and a checkpoint to write


def resolve_mode(mode: str, env: Mapping[str, str]) -> str:
    """Returns the mode: `auto` becomes what W&B's environment variables name, if anything."""
    named = env.get("WANDB_MODE", "")
    if env.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        named = "disabled"
    return named if mode == "auto" and named in MODES else mode


SUFFIX = ".scene.json"

# a name, if a scene has several tables; names of columns; rows
Table = tuple[str, list[str], list[list[Any]]]


def tables_of(scene: Mapping[str, Any]) -> list[Table]:
    """Returns the numbers and texts of a scene as tables; none of pictures and boards, which are on
    the report page alone.
    """
    kind = scene["kind"]
    if kind == "table":
        return [("", scene["columns"], scene["rows"])]
    if kind == "text":
        columns = list(scene["items"][0])
        return [("", columns, [[item[name] for name in columns] for item in scene["items"]])]
    if kind in ("lines", "bars"):
        drawn = scene["lines" if kind == "lines" else "series"]
        columns = [scene["x"].get("label", ""), *(line["name"] for line in drawn)]
        values = [scene["x"]["values"], *(line["values"] for line in drawn)]
        return [("", columns, [list(row) for row in zip(*values, strict=True)])]
    if kind == "matrix":
        return [
            (
                panel.get("name", ""),
                [scene["row_label"], *panel["columns"]],
                [[name, *row] for name, row in zip(panel["rows"], panel["values"], strict=True)],
            )
            for panel in scene["panels"]
            if "values" in panel
        ]
    return []


class Tracker:
    """One W&B run, or none."""

    def __init__(self, say: Callable[[str], None], patience_s: float) -> None:
        """`patience_s` bounds the time of `close`, because other ranks wait for this one."""
        # continues the W&B run; kept for a later start even if W&B is off or fails now
        self.run_id: str | None = None
        self._say, self._patience_s = say, patience_s
        self._run: Any = None

    def start(
        self,
        directory: Path,
        mode: str,
        run_id: str | None,
        project: str | None,
        name: str | None,
        facts: Mapping[str, Any],
    ) -> None:
        """Begins a W&B run, or continues the one of that id. `facts` stand in its config beside the
        run's keys.
        """
        self.run_id = run_id
        if mode == "disabled":
            return
        self.run_id = run_id or secrets.token_hex(5)
        names = {"dir": str(directory), "id": self.run_id, "project": project, "name": name}
        try:
            config = {**read_config(directory), **facts}
            self._run = self._begin(mode, {**names, "config": config, "resume": "allow"})
            for file in (directory / name for name in revision.FILES):
                if file.is_file():  # a copy: `save` would make a link into the run's directory
                    shutil.copyfile(file, Path(self._run.dir) / file.name)
                    self._run.save(f"{self._run.dir}/{file.name}", self._run.dir, policy="now")
        except Exception as error:  # of any kind: W&B is not what the run is about
            self._say(f"W&B: could not start ({brief(error)}); off for this run")

    def log(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Sends a row. W&B keeps the steps that it saw before a run was continued."""
        if self._run is None:
            return
        row = {name: math.nan if value is None else value for name, value in values.items()}
        try:
            self._run.log(row, step=step)
        except Exception as error:
            self._run = None
            self._say(f"W&B: could not log ({brief(error)}); off for this run")

    def show(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Sends those scenes of an evaluated set that are tables to W&B."""
        if self._run is None:
            return
        for name, content in files.items():
            if not name.endswith(SUFFIX):
                continue
            try:
                self._show(step, f"{set_name}/{name.removesuffix(SUFFIX)}", json.loads(content))
            except Exception as error:
                self._say(f"W&B: could not take {name} ({brief(error)})")

    def _show(self, step: int, name: str, scene: Mapping[str, Any]) -> None:
        import wandb

        for part, columns, rows in tables_of(scene):
            # a column may have the steps 1, 2, 3 and `never`
            table = wandb.Table([*columns], rows, allow_mixed_types=True)
            self._run.log({f"{name}/{part}" if part else name: table}, step=step)

    def close(self, ok: bool, hurry: bool = False) -> None:
        """Ends the run as finished or failed, within a bounded time."""
        if (run := self._run) is None:
            return
        self._run, problems = None, []

        def finish() -> None:
            try:
                run.finish(exit_code=int(not ok))
            except Exception as error:
                problems.append(error)

        within = min(HURRY_S if hurry else FINISH_S, self._patience_s)
        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(within)
        if problems:
            self._say(f"W&B: could not finish ({brief(problems[0])})")
        elif thread.is_alive():
            self._say(
                f"W&B: did not finish within {within:g} s; `wandb sync` uploads what its files hold"
            )

    def _begin(self, mode: str, arguments: Mapping[str, Any]) -> Any:
        """Starts a W&B run; records offline where it cannot start online."""
        import wandb

        # W&B's own process logs to its cache, and tables wait to be uploaded in its data folder:
        # both would be under the home directory
        os.environ.setdefault("WANDB_CACHE_DIR", arguments["dir"])
        os.environ.setdefault("WANDB_DATA_DIR", f"{arguments['dir']}/wandb")
        # without a network, reports of errors to its makers would delay the end of the run
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        settings = wandb.Settings(
            init_timeout=INIT_S,
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        if mode != "offline":
            try:
                return wandb.init(mode="online", settings=settings, **arguments)
            except Exception as error:
                wandb.teardown()  # otherwise the online and offline runs conflict
                # a UsageError means that there are no credentials
                if mode == "online" or not isinstance(error, wandb.errors.UsageError):
                    self._say(
                        f"W&B: could not start ({brief(error)}); recording offline, `wandb sync`"
                        " uploads it"
                    )
        return wandb.init(mode="offline", settings=settings, **arguments)
