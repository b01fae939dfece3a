"""Weights & Biases, which never prompts here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from utils import revision
from utils.errors import brief
from utils.files import ROOT
from utils.rundir.services import Logger, RunInfo

MODES = ("auto", "online", "offline", "disabled")
INIT_S = 15.0


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


class WandB(Logger):
    """A run of W&B, which the id continues."""

    about = "W&B"

    def __init__(self, run: RunInfo, say: Callable[[str], None]) -> None:
        self._say = say
        names = {"id": run.wandb_id, "project": run.project, "name": run.name, "resume": "allow"}
        about = {"dir": str(run.directory), "config": dict(run.config), **names}
        self._run = self._begin(run.wandb_mode, about, say)
        for file in (run.directory / name for name in revision.FILES):
            if file.is_file():  # a copy: `save` would make a link into the run's directory
                shutil.copyfile(file, f"{self._run.dir}/{file.name}")
                self._run.save(f"{self._run.dir}/{file.name}", self._run.dir, policy="now")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def show(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Sends those scenes that are tables."""
        for name, content in files.items():
            if not name.endswith(SUFFIX):
                continue
            try:
                self._show(step, f"{set_name}/{name.removesuffix(SUFFIX)}", json.loads(content))
            except Exception as error:  # of one table; W&B goes on
                self._say(f"W&B: could not take {name} ({brief(error)})")

    def _show(self, step: int, name: str, scene: Mapping[str, Any]) -> None:
        import wandb

        for part, columns, rows in tables_of(scene):
            # a column may have the steps 1, 2, 3 and `never`
            table = wandb.Table([*columns], rows, allow_mixed_types=True)
            self._run.log({f"{name}/{part}" if part else name: table}, step=step)

    def finish(self, ok: bool) -> None:
        self._run.finish(exit_code=int(not ok))

    def _begin(self, mode: str, arguments: Mapping[str, Any], say: Callable[[str], None]) -> Any:
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
            git_root=str(ROOT),  # not the folder that the run was started in
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
                    say(
                        f"W&B: could not start ({brief(error)}); recording offline, `wandb sync`"
                        " uploads it"
                    )
        return wandb.init(mode="offline", settings=settings, **arguments)
