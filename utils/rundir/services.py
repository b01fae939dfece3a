"""What every logger does, and those for trackio and TensorBoard; W&B has a separate file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Say = Callable[[str], None]
Row = Mapping[str, float]


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that a logger gets when the run starts."""

    directory: Path
    project: str | None
    name: str | None
    config: Mapping[str, Any]  # the run's keys, and facts beside them
    resumed: int | None  # the step at which it goes on
    wandb_id: str | None
    wandb_mode: str


class Logger:
    """One run in one service. Every method may raise any error, which ends this logger alone."""

    about: str  # its name for users

    def __init__(self, run: RunInfo, say: Say) -> None: ...

    def log(self, step: int, row: Row) -> None: ...

    def show(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Sends what it can of the files of an evaluation; nothing unless a logger does better, as
        the report page has them.
        """

    def finish(self, ok: bool) -> None: ...


class Trackio(Logger):
    """A dashboard of Hugging Face's, on this machine or in a Space that TRACKIO_SPACE_ID names."""

    about = "trackio"

    def __init__(self, run: RunInfo, say: Say) -> None:
        import trackio

        project = run.project or "lockstep"
        resume = "never" if run.resumed is None else "allow"
        with redirect_stdout(io.StringIO()):  # advice for notebooks
            self._run = trackio.init(
                project=project, name=run.name, config=dict(run.config), resume=resume
            )
        say(f"trackio: `trackio show --project {project}` shows the run")

    def log(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, ok: bool) -> None:
        self._run.finish()


class TensorBoard(Logger):
    """Event files in the run's directory."""

    about = "TensorBoard"

    def __init__(self, run: RunInfo, say: Say) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # rows after the checkpoint are logged again
        after = None if run.resumed is None else run.resumed + 1
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=after)
        self._writer.add_text("config", f"```\n{yaml.safe_dump(dict(run.config))}```")

    def log(self, step: int, row: Row) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, ok: bool) -> None:
        self._writer.close()
