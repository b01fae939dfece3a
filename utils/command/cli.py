"""The edge of the program: arguments in, one line of error out, a clean exit in every case."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from omegaconf import DictConfig

from utils.command.arguments import prepare, refuse_usage
from utils.command.complaints import blame, explain
from utils.command.config import resolve
from utils.command.values import visible
from utils.errors import ConfigError, LocalError, PeerError, RankError, RunError, Stopped
from utils.ranks import signals
from utils.ranks.early import open_standard_streams
from utils.ranks.launchers import Launch, detect

if TYPE_CHECKING:  # it needs no torch itself, but whoever has a watch has imported torch, and the others are quicker without
    from utils.ranks.failure_watch import Watch

P = ParamSpec("P")
T = TypeVar("T")
BAD_INPUT, INTERRUPTED = 2, 130
TOLD = "exit_status"  # an error carries it once everybody has heard of the error
LINGER_S = 1.5  # before a failed rank leaves: others read why from what it hosts, and launchers kill the rest when one has gone
PATIENCE_S = 5.0  # to learn why others are gone
ALIKE_S = 2.0  # to hear rank 0 say what this rank has found, too
AGREED_S = 60.0  # the same where it is known that another rank will say it, once it has closed its files


def main(hydra_app: Callable[[], Any]) -> NoReturn:
    """Run the Hydra application to its end."""
    launch = Launch()
    try:
        open_standard_streams()
        launch = detect(os.environ)
        signals.install(launch.rank, partial(_stopped_at_once, launch))
        # PyTorch prints a page of C++ frames when a store's host dies or none is found; what there is to say then is ours to say
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        sys.argv[1:] = prepare(sys.argv[1:], launch.rank, _scratch())
        refuse_usage()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions to us instead of printing them
        try:
            hydra_app()
        except Exception as error:  # a job ends by SystemExit: this is what Hydra met before it, or around it
            if line := blame(error, sys.argv[1:]):
                raise ConfigError(line) from None
            raise
        code = 0
    except BrokenPipeError:
        code = 0  # whoever read along has gone, as in `--help | head`; a job's own errors end it elsewhere
    except BaseException as error:
        code = report(error, launch)
    leave(code)


def run_job(raw: DictConfig, run: Callable[[DictConfig], float | None]) -> float | None:
    """Resolve what Hydra composed and run it; ends the program itself on errors, because Hydra would add a line of its own."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    launch, state = detect(os.environ), HydraConfig.get()
    overrides = list(state.overrides.task) if state.mode == RunMode.MULTIRUN else None
    try:
        if state.job.chdir:
            raise ConfigError("hydra.job.chdir=true: paths are relative to the folder where the command was started; remove it")
        try:
            cfg = resolve(raw, dict(state.runtime.choices), launch, overrides)
        except ConfigError:
            if launch.rank == 0 or overrides is None or "basic_sweeper" in state.sweeper._target_:
                raise
            cfg = raw  # a sweeper that draws at random proposes other values on other ranks; rank 0's count
        return run(cfg)
    except Exception as error:
        raise SystemExit(vars(error).get(TOLD) or report(error, launch)) from None


def told_at_once(work: Callable[P, T]) -> Callable[P, T]:
    """The others hear of an error before this rank closes its files: that may take longer than they would wait for it."""

    @wraps(work)  # no context manager: its generator would keep sweepers from pickling the script's functions
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except Stopped:
            raise
        except Exception as error:
            if TOLD not in vars(error):
                vars(error)[TOLD] = report(error, detect(os.environ))
            raise

    return told


def report(error: BaseException, launch: Launch) -> int:
    """Say what went wrong, once and on one rank, let the others know, and give the exit status."""
    try:
        return _report(error, launch, _watch())
    except Exception as second:  # whatever reporting itself has met, the error is what counts
        signals.say(f"error{_on(launch)}: {type(error).__name__} (telling of it failed: {type(second).__name__})")
        return 1


def _report(error: BaseException, launch: Launch, watch: Watch | None) -> int:
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and watch:  # if this rank or another one has failed before, that was told before and counts
            watch.tell_failure(f"rank {launch.rank} ended with exit status {status}", status, spoken=False)
        return status
    if isinstance(error, Stopped):
        if launch.rank == 0:
            signals.say(str(error))
        _leave_group()  # all ranks have agreed: nobody waits for another any more
        return signals.STATUS[error.signum]
    if isinstance(error, KeyboardInterrupt):
        signals.say(f"interrupted{_on(launch) if launch.rank else ''}")
        return INTERRUPTED
    line = str(error) if isinstance(error, ConfigError | PeerError | RankError | RunError) else explain(error)
    line = visible(line)  # what a user has typed, or how a file is called, must not reach the terminal as it is
    status = 1 if isinstance(error, RankError | RunError) or not line else BAD_INPUT
    if (told := _told_elsewhere(error, line, status, launch, watch)) is not None:
        return told
    summary = line or _summary(error)
    local = launch.rank > 0 or not line or isinstance(error, LocalError | RankError)
    trace = "" if line else "\n" + "".join(traceback.format_exception(error)).rstrip()
    signals.say(f"error{_on(launch) if local else ''}: {summary}{trace}")
    if watch:
        watch.tell_failure(summary, status)
        time.sleep(LINGER_S)
    return status


def _told_elsewhere(error: BaseException, line: str, status: int, launch: Launch, watch: Watch | None) -> int | None:
    """The exit status where another rank tells the user, or None: this one has to speak."""
    agreed = isinstance(error, PeerError) or (isinstance(error, RunError) and launch.rank > 0)
    alike = bool(line) and launch.rank > 0 and not isinstance(error, LocalError | RankError)  # rank 0 finds the same, as a rule
    if not (agreed or alike or (watch and _is_echo(error))):
        return None
    began = time.monotonic()
    cause = watch.why(AGREED_S if agreed else ALIKE_S if alike else PATIENCE_S) if watch else None
    if watch and not agreed and (cause is None or (alike and cause.text != line)):
        return None  # nobody has said this
    # a launcher that saw this rank gone first would kill the one that speaks
    time.sleep(cause.linger_s if cause else max(0.0, LINGER_S - (time.monotonic() - began)))
    return cause.status if cause else status


def _is_echo(error: BaseException) -> bool:
    """Whether an error may come of another rank's end: the types and texts of collectives' own errors tell."""
    if "torch" not in sys.modules:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _stopped_at_once(launch: Launch, signum: int, line: str) -> bool:
    """A signal ends this process before or while it could stop in good order; whether this rank is to say so."""
    shutil.rmtree(_scratch(), ignore_errors=True)
    if watch := _watch():
        watch.tell_failure(f"rank {launch.rank} was {line}", signals.STATUS[signum], spoken=launch.rank == 0)
        time.sleep(0.3)  # if the others hear it from rank 0, that must pass it on
    return launch.rank == 0


def _watch() -> Watch | None:
    module = sys.modules.get("utils.ranks.distributed")  # without it there is no group, and no need to import torch to find out
    dist = module.current() if module and hasattr(module, "current") else None  # a signal may come in mid-import
    return dist.watch if dist and dist.world_size > 1 else None


def _summary(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:  # a __str__ of its own
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _leave_group() -> None:
    if "utils.ranks.distributed" in sys.modules:  # else there is no group, and no need to import torch for it
        with suppress(Exception):  # the run is over, whatever the backend finds on its way out
            sys.modules["utils.ranks.distributed"].stop()


def leave(code: int) -> NoReturn:
    """Leave the group, flush, and skip the interpreter's own exit: threads of backends may abort in it."""
    # after a failure others may be waiting in a collective, and leaving in good order would wait for them
    if code == 0:
        _leave_group()
    shutil.rmtree(_scratch(), ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _scratch() -> str:
    """Where a rank other than 0 lets Hydra write what rank 0 writes for all."""
    return f"{tempfile.gettempdir()}/lockstep-sweep-{os.getpid()}"


def _on(launch: Launch) -> str:
    return f" on rank {launch.rank}" if launch.world_size > 1 else ""
