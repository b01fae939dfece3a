"""The edge of the program: arguments in, one line of error out, a clean exit in every case.

Importing it loads nothing slow, nor does anything here before signals are heard: somebody may press Ctrl-C at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from utils.errors import ConfigError, LocalError, PeerError, RankError, RunError, Stopped, visible
from utils.ranks import signals
from utils.ranks.failure import ECHO, ENDED, FOUND, LINGER_S, PRINTED, Failure, summary
from utils.ranks.launchers import Launch, detect

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from utils.ranks.failure_watch import Watch

BAD_INPUT, INTERRUPTED = 2, 130
REPORTED = "exit_status"  # an error has it once it has been reported


class _Checked(BaseException):
    """The configuration is right; what Hydra would do next is not wanted yet."""


def check(arguments: list[str], config_in: Callable[[str], Mapping[Any, Any]], sweep: Callable[[Sequence[str], Launch], None]) -> None:
    """End here with whatever the command line alone tells: an answer to `--help`, or one line of error. Makes it what Hydra can read.

    `config_in`: the configuration in a checkpoint, for evaluations. `sweep` runs several jobs, if that takes nothing but processes.
    """
    with _ending_here():
        from utils.command.arguments import prepare, refuse_usage, sweeps

        launch = detect(os.environ)
        arguments[1:] = prepare(arguments[1:], launch.rank, _scratch(), config_in)
        refuse_usage()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions to us instead of printing them
        if sweeps(arguments):
            sweep(arguments[1:], launch)
            return  # its jobs are looked at one by one
        import hydra

        from utils.command.config import CONF

        def stop(cfg: DictConfig) -> NoReturn:
            raise _Checked

        job = partial(run_job, run=stop)
        job.__module__ = "pretrain"  # by which Hydra calls the program
        try:
            hydra.main(config_path=str(CONF), config_name="pretrain", version_base="1.3")(job)()
        except _Checked:
            return
        leave(0)  # it has answered


def main(hydra_app: Callable[[], Any]) -> NoReturn:
    """Run the Hydra application to its end."""
    with _ending_here():
        hydra_app()
    leave(0)


def run_job(raw: DictConfig, run: Callable[[DictConfig], float | None]) -> float | None:
    """Resolve what Hydra composed and run it; ends the program itself on errors, because Hydra would add a line of its own."""
    try:
        return run(resolved(raw))
    except Exception as error:
        raise SystemExit(report(error, detect(os.environ))) from None


def resolved(raw: DictConfig, launch: Launch | None = None) -> DictConfig:
    """The checked configuration of one job, for this launch or for another; inside Hydra."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from utils.command.config import resolve

    launch, state = launch or detect(os.environ), HydraConfig.get()
    overrides = list(state.overrides.task) if state.mode == RunMode.MULTIRUN else None
    if state.job.chdir:
        raise ConfigError("hydra.job.chdir=true: paths are relative to the folder where the command was started; remove it")
    try:
        return resolve(raw, dict(state.runtime.choices), launch, overrides)
    except ConfigError:
        if launch.rank == 0 or overrides is None or "basic_sweeper" in state.sweeper._target_:
            raise
        return raw  # a sweeper that draws at random proposes other values on other ranks; rank 0's count


@contextmanager
def reporting() -> Iterator[None]:
    """An error is reported before this rank closes its files: that may take longer than others would wait for it."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        report(error, detect(os.environ))
        raise


def report(error: BaseException, launch: Launch) -> int:
    """Have the user read what went wrong, once and from one rank, and give the exit status."""
    if (status := vars(error).get(REPORTED)) is None:
        try:
            status = _report(error, launch, _watch())
        except Exception as second:  # whatever reporting itself has met, the error is what counts
            signals.say(f"error{_on(launch)}: {type(error).__name__} (reporting it failed: {type(second).__name__})")
            status = 1
        vars(error)[REPORTED] = status
    return status


def _report(error: BaseException, launch: Launch, watch: Watch | None) -> int:
    if isinstance(error, Stopped):
        if launch.rank == 0:
            signals.say(str(error))
        _leave_group()  # all ranks know: nobody waits for another any more
        return signals.STATUS[error.signum]
    if isinstance(error, KeyboardInterrupt):
        signals.say(f"interrupted{_on(launch) if launch.rank else ''}")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not status or watch is None or watch.reported:
            return status
        failure = Failure(f"rank {launch.rank} ended with exit status {status}", status, ENDED)
    else:
        failure = _failure(error, launch, alone=watch is None)
    if watch is not None:  # the failure server decides what is printed
        watch.report(failure)
        if cause := watch.wait_for_cause():
            return cause.status
    alone = watch is not None or bool(failure.trace) or isinstance(error, LocalError | RankError)
    if watch is None and (isinstance(error, PeerError) or (launch.rank > 0 and not alone)):  # another rank prints it, or finds the same
        time.sleep(LINGER_S)
    else:
        signals.say(failure.shown(_on(launch) if alone else ""))
    return failure.status


def _failure(error: BaseException, launch: Launch, alone: bool) -> Failure:
    """What the user and the other ranks should know of an error. Nobody else explains that of a process alone."""
    from utils.command.complaints import explain

    line = str(error) if isinstance(error, ConfigError | PeerError | RankError | RunError) else explain(error)
    line = visible(line)  # what a user has typed, or how a file is called, must not reach the terminal as it is
    status = 1 if isinstance(error, RankError | RunError) or not line else BAD_INPUT
    echo = isinstance(error, PeerError) or (isinstance(error, RunError) and launch.rank > 0)  # of RunErrors rank 0 knows best
    trace = "" if line else "".join(traceback.format_exception(error)).rstrip()
    return Failure(line or summary(error), status, ECHO if echo or (not alone and _is_collectives(error)) else FOUND, trace)


def _is_collectives(error: BaseException) -> bool:
    """Whether an error may come of another rank's end: the types and texts of collectives' own errors tell."""
    if "torch" not in sys.modules:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _stopped_at_once(launch: Launch, signum: int, line: str) -> bool:
    """A signal ends this process before or while it could stop in good order; whether this rank is to say so."""
    shutil.rmtree(_scratch(), ignore_errors=True)
    if (watch := _watch()) is not None:
        if watch.reported or watch.cause:  # launchers end all when one has gone
            return False
        watch.report(Failure(f"rank {launch.rank} was {line}", signals.STATUS[signum], ENDED if launch.rank else PRINTED))
        time.sleep(0.3)  # if the others hear it from rank 0, that must pass it on
    return launch.rank == 0


def _watch() -> Watch | None:
    module = sys.modules.get("utils.ranks.distributed")  # without it there is no group, and no need to import torch to find out
    dist = module.current() if module and hasattr(module, "current") else None  # a signal may come in mid-import
    return dist.watch if dist and dist.world_size > 1 else None


@contextmanager
def _ending_here() -> Iterator[None]:
    """Signals are heard from here on, and errors end the program."""
    launch = Launch()
    try:
        _open_standard_streams()
        launch = detect(os.environ)
        signals.install(launch.rank, partial(_stopped_at_once, launch))
        # PyTorch prints a page of C++ frames when a store's host dies or none is found; what there is to say then is ours to say
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        yield
    except BrokenPipeError:
        leave(0)  # whoever read along has gone, as in `--help | head`; a job's own errors end it elsewhere
    except Exception as error:  # a job ends by SystemExit: this is what Hydra met before it, or around it
        from utils.command.complaints import blame

        line = blame(error, sys.argv[1:])
        leave(report(ConfigError(line) if line else error, launch))
    except BaseException as error:
        leave(report(error, launch))


def _open_standard_streams() -> None:
    """A closed descriptor 0, 1 or 2 goes to the next file that is opened, and what anybody prints would land in that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 (open to the end)


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
