"""The edge of the program: arguments in, one line of error out, a clean exit in every case."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from utils.config import explain
from utils.errors import ConfigError, LocalError, PeerError
from utils.launchers import Launch, detect

BAD_INPUT, INTERRUPTED = 2, 130


def main(hydra_app: Callable[[], Any], stop: Callable[[], None]) -> NoReturn:
    """Run the Hydra application; `stop` leaves the process group."""
    launch = Launch()
    try:
        launch = detect(os.environ)
        sys.argv[1:] = prepare(sys.argv[1:], launch)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions to us instead of printing them
        hydra_app()
        code = 0
    except BaseException as error:
        code = report(error, launch)
    leave(code, stop)


def prepare(arguments: list[str], launch: Launch) -> list[str]:
    """Arguments as Hydra wants them: `+key=` may also name a key that exists, and one rank alone writes sweep files."""
    arguments = ["+" + a if a.startswith("+") and not a.startswith("++") else a for a in arguments]
    if launch.rank > 0:
        arguments.append(f"hydra.sweep.dir={tempfile.gettempdir()}/lockstep-sweep-{os.getpid()}")
    return arguments


def report(error: BaseException, launch: Launch) -> int:
    """Say what went wrong, once, and give the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted{_on(launch)}", file=sys.stderr)
        return INTERRUPTED
    line = str(error) if isinstance(error, ConfigError | PeerError) else explain(error)
    if not line:
        print(f"error{_on(launch)}: {''.join(traceback.format_exception(error))}", file=sys.stderr)
        return 1
    if (launch.rank > 0 and not isinstance(error, LocalError)) or isinstance(error, PeerError):
        # the rank that speaks must finish before a launcher sees us gone and kills it; with bad input
        # on every rank that is rank 0, and we are usually killed before our own turn
        sys.stderr.flush()
        time.sleep(1.5)
        if isinstance(error, PeerError):
            return BAD_INPUT
    print(f"error{_on(launch)}: {line}", file=sys.stderr)
    return BAD_INPUT


def leave(code: int, stop: Callable[[], None]) -> NoReturn:
    """Leave the group, flush, and skip the interpreter's own exit: threads of backends may abort in it."""
    try:
        stop()
    except Exception as error:  # the status of the run matters more than a group that is already broken
        print(f"while leaving the process group: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _on(launch: Launch) -> str:
    return f" on rank {launch.rank}" if launch.rank > 0 else ""
