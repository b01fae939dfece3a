"""Makes the runs that a run needs: if a key that names a run holds arguments instead of a path, the
same ranks make that run first.

Such a run is like any other. The name of its directory follows from its configuration, so it
resumes where it was interrupted, and later runs find it finished.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from utils.command import config as configs
from utils.command.arguments import prepare
from utils.command.hydra_errors import explain
from utils.command.keys import fields_of, marked, run_values
from utils.command.marks import A_RUN, SAME_RUN
from utils.command.root import Config
from utils.errors import Busy, ConfigError, Stopped, short
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.ranks.launchers import detect
from utils.rundir.records import read_config
from utils.rundir.status import state_of

PAUSE_S = 2.0
# keys that a needed run inherits from the run that needs it, unless its arguments have them
INHERITED = (
    *("data_path", "device", "backend", "timeout_s", "exact", "num_workers"),
    *("log", "wandb.mode"),
)


def with_needed_runs(config: Config, dist: Dist, run: Callable[[Config], Any]) -> Config:
    """Makes the runs that a configuration needs, and returns it with their paths.

    `run` trains one that is missing. Called on all ranks together.
    """
    plain, paths = config.plain(), dict[str, str]()
    for path, value in marked(plain, fields_of(plain), A_RUN):
        if not isinstance(value, str) or "=" not in value:
            continue
        # rank 0 decides, since whether there is such a path may depend on the host
        if not dist.broadcast_text("yes" if is_arguments(value) else ""):
            continue
        with dist.agreed():
            needed = _resolve(path, value, config)
        done = _is_finished(needed, dist)
        if not done and config.plan == "show":
            raise ConfigError(
                f"plan=show: {path} is a run that is not made yet; python pretrain.py {value}"
            )
        if not done and not _make(needed, run):
            _wait(path, needed, dist, run)
        paths[path] = os.path.abspath(needed.checkpoint_path)
    return config.with_values(paths)


def is_arguments(value: str) -> bool:
    """Returns whether a value holds the arguments of a run, and not a path, even a mistyped one."""
    return "=" in value and "/" not in value.partition("=")[0] and not os.path.exists(value)


def _resolve(path: str, value: str, config: Config) -> Config:
    """Returns the configuration of the run that these arguments describe."""
    try:
        arguments = shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{path}={short(value)}: {error}") from None
    keys = {word.partition("=")[0] for word in arguments}
    # its name follows from its configuration
    inherited = [] if "run_name" in keys else ["run_name=null"]
    for key in INHERITED:
        if key not in keys and (here := attrgetter(key)(config)) is not None:
            text = str(here).lower() if isinstance(here, bool) else here
            inherited.append(f"{key}={text}")
    try:
        raw = compose("pretrain", prepare([*inherited, *arguments]), return_hydra_config=True)
        return configs.resolve(raw, dict(raw.hydra.runtime.choices), detect(os.environ))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        line = str(error) if isinstance(error, ConfigError) else explain(error)
        raise ConfigError(f"{path}={short(value)}: {line}") from None


def _is_finished(needed: Config, dist: Dist) -> bool:
    """Returns whether this run exists and is finished, as rank 0 sees it."""
    folder = Path(needed.checkpoint_path)
    done = state_of(folder) == "finished" and _is_of(folder, needed)
    return bool(dist.broadcast_text("yes" if done else ""))


def _is_of(folder: Path, needed: Config) -> bool:
    """Returns whether the run in a folder has this configuration; if not, making it says why."""
    now, then = needed.plain(), read_config(folder)
    if not then:
        return False
    fields = fields_of(now)
    there, here = (run_values(config, fields, SAME_RUN) for config in (then, now))
    return all(value in (there.get(path, value), "auto") for path, value in here.items())


def _wait(path: str, needed: Config, dist: Dist, run: Callable[[Config], Any]) -> None:
    """Waits until another process has made the run, or has given up, so that this one makes it."""
    if dist.is_main:
        print(f"{path}: waiting for {needed.checkpoint_path}, which another run makes", flush=True)
    while not _is_finished(needed, dist) and not _make(needed, run):
        time.sleep(PAUSE_S)
        if signum := signals.agreed_signal(dist.sums(signals.flags)):
            raise Stopped(
                signum, f"{signal.Signals(signum).name} while waiting for {needed.checkpoint_path}"
            )


def _make(needed: Config, run: Callable[[Config], Any]) -> bool:
    """Makes the run, unless another process is at it. Returns whether it was made."""
    try:
        run(needed)
    except Busy:
        return False
    return True
