"""Trains the runs that a run needs: if a key that names a run holds arguments instead of a path,
the same ranks train that run first.

Such a run is like any other. The name of its directory follows from its configuration, so it
resumes where it was interrupted, and later runs find it finished. Its folder is fixed at the first
start: checkpoints hold the path and the arguments, and a resume or an evaluation trains no run.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from utils.command import config as configs
from utils.command.arguments import key_of, prepare
from utils.command.explain import explain
from utils.command.keys import fields_of, leaves, marked, run_values
from utils.command.marks import A_RUN, SAME_RUN
from utils.command.root import Config
from utils.errors import Busy, ConfigError, Stopped, short
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.ranks.launchers import detect
from utils.rundir.records import read_config
from utils.rundir.status import state_of

PAUSE_S = 2.0
# keys that such a run inherits, unless its arguments have them
SAME_WEIGHTS = ("data_path", "exact")
INHERITED = (
    *SAME_WEIGHTS,
    *("device", "backend", "timeout_s", "num_workers", "log", "wandb.mode"),
)


def with_needed_runs(
    config: Config, meta: Mapping[str, Any], dist: Dist, run: Callable[[Config], Any]
) -> tuple[Config, dict[str, str]]:
    """Makes the runs that a configuration needs. Returns it with their paths, and the arguments of
    each by its key.

    `meta` is that of the checkpoint from which the run starts, if any; `run` trains a run that is
    missing. Called on all ranks together.
    """
    plain, paths = config.plain(), dict[str, str]()
    needed_runs = dict(meta.get("needed_runs", {}))
    settled = dict(leaves(meta.get("config", {})))
    for key, value in marked(plain, fields_of(plain), A_RUN):
        if not isinstance(value, str):
            continue
        # rank 0 decides, since whether there is such a path may depend on the host
        named = value if dist.broadcast_text("yes" if is_arguments(value) else "") else ""
        same = config.eval_only or needed_runs.get(key) == named
        if named and same and not is_arguments(then := str(settled.get(key, "="))):
            value = paths[key] = then
        elif named and config.eval_only:
            raise ConfigError(
                f"{key}={short(named)}: an evaluation trains no other run; give the folder of one"
            )
        elif named:
            paths[key] = _found_or_made(key, named, config, dist, run)
            needed_runs[key] = named
            continue
        if key in needed_runs:
            with dist.agreed():
                if dist.is_main and not os.path.exists(value):
                    raise _gone(key, value, needed_runs[key], config)
    return config.with_values(paths), needed_runs


def is_arguments(value: str) -> bool:
    """True for the arguments of a run, False for a path, even a mistyped one."""
    return "=" in value and "/" not in value.partition("=")[0] and not os.path.exists(value)


def _gone(key: str, path: str, arguments: str, config: Config) -> ConfigError:
    """Returns the error for a run that was made before; its arguments may be a stranger's."""
    words = [*shlex.split(arguments), *_inherited(config, SAME_WEIGHTS), f"checkpoint_path={path}"]
    return ConfigError(
        f"{key}={path}: the run that was there is gone; python pretrain.py {shlex.join(words)}"
        " trains it again"
    )


def _found_or_made(
    key: str, value: str, config: Config, dist: Dist, run: Callable[[Config], Any]
) -> str:
    """Returns the path of the run that these arguments describe, which is made if it is missing."""
    with dist.agreed():
        needed = _resolve(key, value, config)
    done = _is_finished(needed, dist)
    if not done and config.plan == "show":
        raise ConfigError(
            f"plan=show: {key} is a run that is not trained yet; first python pretrain.py {value}"
        )
    if not done and not _make(needed, run):
        _wait(key, needed, dist, run)
    return os.path.abspath(needed.checkpoint_path)


def _resolve(path: str, value: str, config: Config) -> Config:
    """Returns the configuration of the run that these arguments describe."""
    try:
        arguments = shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{path}={short(value)}: {error}") from None
    keys = {*map(key_of, arguments)}
    if of_hydra := [key for key in keys if key.partition(".")[0] == "hydra"]:
        raise ConfigError(f"{path}={short(value)}: {of_hydra[0]} is not a key of a run; remove it")
    # its name follows from its configuration
    inherited = ["run_name=null"] * ("run_name" not in keys)
    inherited += _inherited(config, [key for key in INHERITED if key not in keys])
    try:
        raw = compose("pretrain", prepare([*inherited, *arguments]), return_hydra_config=True)
        return configs.resolve(raw, raw.hydra.runtime.choices, detect(os.environ))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}={short(value)}: {explain(error)}") from None


def _inherited(config: Config, keys: Iterable[str]) -> list[str]:
    """Returns these keys of the run at hand as arguments."""
    values = {key: attrgetter(key)(config) for key in keys}
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
        if value is not None
    ]


def _is_finished(needed: Config, dist: Dist) -> bool:
    """True if this run exists and is finished, as rank 0 sees it."""
    folder = Path(needed.checkpoint_path)
    done = state_of(folder) == "finished" and _is_of(folder, needed)
    return bool(dist.broadcast_text("yes" if done else ""))


def _is_of(folder: Path, needed: Config) -> bool:
    """Whether the run in a folder has this configuration; if not, making it reports why."""
    now, then = needed.plain(), read_config(folder)
    if not then:
        return False
    fields = fields_of(now)
    there, here = (run_values(config, fields, SAME_RUN) for config in (then, now))
    return all(value in (there.get(path, value), "auto") for path, value in here.items())


def _wait(path: str, needed: Config, dist: Dist, run: Callable[[Config], Any]) -> None:
    """Waits until another process has made the run; if that gives up, makes it."""
    if dist.is_main:
        print(f"{path}: waiting for {needed.checkpoint_path}, which another run trains", flush=True)
    while not _is_finished(needed, dist) and not _make(needed, run):
        time.sleep(PAUSE_S)
        if signum := signals.agreed_signal(dist.sums(signals.flags)):
            raise Stopped(
                signum, f"{signal.Signals(signum).name} while waiting for {needed.checkpoint_path}"
            )


def _make(needed: Config, run: Callable[[Config], Any]) -> bool:
    """Makes the run; False if another process is making it."""
    try:
        run(needed)
    except Busy:
        return False
    return True
