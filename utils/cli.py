"""The edge of the program: arguments in, one line of error out, a clean exit in every case."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from omegaconf import DictConfig

from utils.config import GROUPS, explain, resolve
from utils.errors import ConfigError, LocalError, PeerError, RunError
from utils.launchers import Launch, detect

BAD_INPUT, INTERRUPTED = 2, 130


def main(hydra_app: Callable[[], Any]) -> NoReturn:
    """Run the Hydra application to its end."""
    launch = Launch()
    try:
        launch = detect(os.environ)
        sys.argv[1:] = prepare(sys.argv[1:], launch)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions to us instead of printing them
        hydra_app()
        code = 0
    except BaseException as error:
        code = report(error, launch)
    leave(code)


def run_job(raw: DictConfig, run: Callable[[DictConfig], float | None]) -> float | None:
    """Resolve what Hydra composed and run it; ends the program itself on errors, because Hydra would add a line of its own."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    launch, state = detect(os.environ), HydraConfig.get()
    number = state.job.num if state.mode == RunMode.MULTIRUN else None
    try:
        try:
            cfg = resolve(raw, dict(state.runtime.choices), launch, number)
        except ConfigError:
            if launch.rank == 0 or number is None:
                raise
            cfg = raw  # a sweeper that draws at random proposes other values on other ranks; rank 0's count
        return run(cfg)
    except Exception as error:
        raise SystemExit(report(error, launch)) from None


def prepare(arguments: list[str], launch: Launch) -> list[str]:
    """Arguments as Hydra wants them: `+key=` may also name a key that exists, and one rank alone writes sweep files."""
    groups = tuple(f"+{group}=" for group in (*GROUPS, "experiment"))
    for i, argument in enumerate(arguments):
        if argument.startswith(groups):
            arguments[i] = argument[1:]
        elif argument.startswith("+") and not argument.startswith("++"):
            arguments[i] = "+" + argument
    if launch.rank > 0:
        arguments.append(f"hydra.sweep.dir={_scratch()}")
    return arguments


def report(error: BaseException, launch: Launch) -> int:
    """Say what went wrong, once, and give the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted{_on(launch)}", file=sys.stderr)
        return INTERRUPTED
    line = str(error) if isinstance(error, ConfigError | PeerError | RunError) else explain(error)
    if not line:
        print(f"error{_on(launch)}: {''.join(traceback.format_exception(error))}", file=sys.stderr)
        return 1
    status = 1 if isinstance(error, RunError) else BAD_INPUT
    if isinstance(error, PeerError) or (launch.rank > 0 and not isinstance(error, LocalError)):
        # another rank says it (rank 0 what is wrong on all); a launcher that saw us gone first would kill it before that
        time.sleep(1.5)
        return status
    print(f"error{_on(launch)}: {line}", file=sys.stderr)
    return status


def leave(code: int) -> NoReturn:
    """Leave the group, flush, and skip the interpreter's own exit: threads of backends may abort in it."""
    # after a failure others may be waiting in a collective, and leaving in good order would wait for them
    if code == 0 and "utils.distributed" in sys.modules:  # else there is no group, and no need to import torch for it
        sys.modules["utils.distributed"].stop()
    shutil.rmtree(_scratch(), ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scratch() -> str:
    """Where a rank other than 0 lets Hydra write what rank 0 writes for all."""
    return f"{tempfile.gettempdir()}/lockstep-sweep-{os.getpid()}"


def _on(launch: Launch) -> str:
    return f" on rank {launch.rank}" if launch.rank > 0 else ""
