"""The edge of the program: arguments in, one line of error out, a clean exit in every case."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch.distributed import DistError

from utils.command import help as help_text
from utils.command import keys
from utils.command.arguments import DEFINE_A_RUN, key_of, prepare
from utils.command.config import resolve
from utils.command.explain import explain
from utils.command.limits import check_paths
from utils.command.marks import SAME_RUN
from utils.command.naming import SweepJob, sweep_name
from utils.command.root import Config, Root
from utils.errors import (
    ConfigError,
    LocalError,
    PeerError,
    RankError,
    RunError,
    Stopped,
    type_and_text,
    visible,
)
from utils.ranks import distributed, signals
from utils.ranks.launchers import Launch, detect, on_one_host
from utils.ranks.watch import ECHO, ENDED, FOUND, LINGER_S, PRINTED, Failure, Watch

T = TypeVar("T")
ConfigIn = Callable[[str], Mapping[Any, Any]]  # reads the configuration in a checkpoint

# hydra.sweep.dir is named after what is swept, so that the same sweep finds its own folder
# OmegaConf 2.4 has renamed this function
register = OmegaConf.register_new_resolver if keys.HYDRA_ARGUMENTS else OmegaConf.register_resolver
# cached, so that jobs see the name of their sweep
register("sweep_name", sweep_name, use_cache=True)
BAD_INPUT, INTERRUPTED = 2, 130
REPORTED = "exit_status"  # an error has it once it has been reported
# an evaluation has these from the run that it evaluates, although they say how a machine computes
KEPT_FROM_THE_RUN = {"run_name", "project_name", "eval_batch_size"}


def main(app: Callable[[], Any]) -> NoReturn:
    """Runs the program that `hydra.main` has wrapped, then ends the process."""
    launch = Launch()
    try:
        launch = detect(os.environ)
        signals.install(launch.rank, partial(_stopped_at_once, launch))
        if {*help_text.WANTED} & {*sys.argv}:
            text = help_text.answer(sys.argv[1:])
            if launch.rank == 0:
                print(text)
        else:
            sys.argv[1:] = prepare(sys.argv[1:], launch)
            # Hydra then hands its exceptions to us instead of printing them
            os.environ["HYDRA_FULL_ERROR"] = "1"
            app()
        leave(0)
    except BrokenPipeError:
        # the reader of the pipe has gone, as in `--help | head`; a job's own errors end it above
        leave(0)
    except BaseException as error:
        leave(report(error, launch))


def run_job(raw: DictConfig, config_in: ConfigIn, run: Callable[[Config], T]) -> T:
    """Runs one job that Hydra composed, and ends the program on errors itself: Hydra would add a
    line.
    """
    try:
        launch = detect(os.environ)
        config = resolve_job(raw, config_in, launch)
        if on_one_host(os.environ, launch):  # other hosts may see other disks
            check_paths(config)
        return run(config)
    except Exception as error:
        raise SystemExit(report(error, detect(os.environ))) from None


def resolve_job(raw: DictConfig, config_in: ConfigIn, launch: Launch) -> Config:
    """Returns the checked configuration of one job; called inside Hydra.

    An evaluation that names no arch, data or experiment has that of its checkpoint, which
    `config_in` reads.
    """
    state = HydraConfig.get()
    if state.job.chdir:
        raise ConfigError("hydra.job.chdir=true: paths are relative to where a run starts")
    named = [*map(key_of, state.overrides.task)]
    if raw.get("eval_only") is True and raw.get("checkpoint") and not DEFINE_A_RUN & {*named}:
        raw = _adopt(raw, named, config_in(str(raw.checkpoint)))
    job = SweepJob(state.overrides.task, Path(state.sweep.dir).name)
    is_sweep = state.mode == RunMode.MULTIRUN
    return resolve(raw, state.runtime.choices, launch, job if is_sweep else None)


def _adopt(raw: DictConfig, named: Sequence[str], saved: Mapping[Any, Any]) -> DictConfig:
    """Returns a saved run's configuration, with the keys that were named, and those that say how
    this machine computes.
    """
    if not saved:  # a file of weights alone
        return raw
    machine = {key for key, field in Root.model_fields.items() if SAME_RUN in field.metadata}
    machine = {"sync", *machine & raw.keys()} - KEPT_FROM_THE_RUN
    config = OmegaConf.create(dict(saved))
    for key in [*machine, *named]:
        if not key.startswith("hydra"):
            # merged, `sync` would keep the arguments of the way that it replaces
            OmegaConf.update(config, key, OmegaConf.select(raw, key), merge=False, force_add=True)
    return config


@contextmanager
def reporting() -> Iterator[None]:
    """Reports an error before this rank closes its files, for which other ranks may not wait."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        report(error, detect(os.environ))
        raise


def report(error: BaseException, launch: Launch) -> int:
    """Prints what went wrong, once and from one rank; returns the exit status."""
    if (status := vars(error).get(REPORTED)) is None:
        status = vars(error)[REPORTED] = _report(error, launch, _watch())
    return status


def _report(error: BaseException, launch: Launch, watch: Watch | None) -> int:
    if isinstance(error, Stopped):
        if launch.rank == 0:
            signals.say(str(error))
        _leave_group()  # all ranks know: none waits for another any more
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
    if watch is not None and (cause := watch.report(failure)):  # rank 0 has printed it
        return cause.status
    alone = watch is not None or bool(failure.trace) or isinstance(error, LocalError | RankError)
    # another rank prints it, or finds the same
    if watch is None and (isinstance(error, PeerError) or (launch.rank > 0 and not alone)):
        time.sleep(LINGER_S)
    else:
        signals.say(failure.message(_on(launch) if alone else ""))
    return failure.status


def _failure(error: BaseException, launch: Launch, alone: bool) -> Failure:
    """Returns the report of an error for the user and the other ranks; `alone`: no other rank can
    explain it.
    """
    # arguments and names of files may hold characters that control the terminal
    line = visible(explain(error))
    status = 1 if isinstance(error, RankError | RunError) or not line else BAD_INPUT
    # of RunErrors rank 0 knows best
    echo = isinstance(error, PeerError) or (isinstance(error, RunError) and launch.rank > 0)
    trace = "" if line else "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        line or type_and_text(error),
        status,
        ECHO if echo or (not alone and _is_collectives(error)) else FOUND,
        trace,
    )


def _is_collectives(error: BaseException) -> bool:
    """Whether the type and text of an error suggest that another rank has ended."""
    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _stopped_at_once(launch: Launch, signum: int, line: str) -> bool:
    """Reports that a signal ends this process at once; returns whether this rank prints it."""
    if (watch := _watch()) is not None:
        if watch.reported or watch.cause:  # launchers end all when one has gone
            return False
        kind = ENDED if launch.rank else PRINTED
        watch.report(Failure(f"rank {launch.rank} was {line}", signals.STATUS[signum], kind))
    return launch.rank == 0


def _watch() -> Watch | None:
    dist = distributed.current()
    return dist.watch if dist and dist.world_size > 1 else None


def _leave_group() -> None:
    with suppress(Exception):  # the run is over, whatever the backend raises as it shuts down
        distributed.stop()


def leave(code: int) -> NoReturn:
    """Leaves the group, flushes, and skips the interpreter's exit, in which threads of backends may
    abort.
    """
    # after a failure others may be in a collective, and leaving the group would wait for them
    if code == 0:
        _leave_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _on(launch: Launch) -> str:
    return f" on rank {launch.rank}" if launch.world_size > 1 else ""
