"""Runs a command line with -m: this process runs the whole sweep before anything slow is loaded.

Importing it loads nothing slow either.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from utils.command import cli
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

if TYPE_CHECKING:
    from omegaconf import DictConfig

READABLE = 60  # characters of a sweep's name
LAUNCHER, OWN = "hydra/launcher", "sweep."
LENGTH = "hydra.sweeper.trials="  # more trials belong to the same study


def sweep(arguments: Sequence[str], launch: Launch) -> None:
    """Runs the sweep and ends the program. Returns only if this process is to run jobs itself: with
    all ranks together, or under another of Hydra's launchers.
    """
    import hydra
    from hydra.core.plugins import Plugins

    from utils.command.arguments import SWEEPS
    from utils.command.config import CONF
    from utils.sweep.launcher import Local, Multirun
    from utils.sweep.trials import Trials

    # `prepare` has put options and their values before `--`
    end = arguments.index("--") if "--" in arguments else 0
    options, overrides = (
        [argument for argument in arguments[:end] if argument not in SWEEPS],
        arguments[end + bool(end) :],
    )
    other = next(
        (
            override
            for override in overrides
            if override.startswith(f"{LAUNCHER}=") and override != f"{LAUNCHER}=local"
        ),
        "",
    )
    if other and (
        ours := next((override for override in overrides if override.startswith(OWN)), "")
    ):
        raise ConfigError(f"{ours}: is for {LAUNCHER}=local; remove {other}")
    os.environ["LOCKSTEP_SWEEP"] = folder_name(overrides)  # hydra.sweep.dir reads it
    multirun = Multirun(launch, options)
    # Hydra instantiates them by name, and only from its own namespace
    for plugin in (Local, Trials):
        plugin.multirun = multirun
        Plugins.instance().class_name_to_class[f"hydra_plugins.lockstep.{plugin.__name__}"] = plugin
    if launch.world_size > 1 or other:
        return

    def task(config: DictConfig) -> NoReturn:
        raise ConfigError(
            f"{LAUNCHER}: is set in a file, which is read too late; give it on the command line"
        )

    task.__module__ = "pretrain"  # by which Hydra calls the program
    try:
        hydra.main(config_path=str(CONF), config_name="pretrain", version_base="1.3")(task)()
        status = multirun.finish()
    except Exception as error:
        multirun.conclude(error)
        raise
    multirun.conclude(None, status)
    cli.leave(status)


def folder_name(overrides: Sequence[str]) -> str:
    """Returns the name of a sweep's folder, which depends on what is swept, but not on which job a
    task of a job array runs, nor on how many run at once.
    """
    from utils.command.naming import UNFIT

    own = [override for override in overrides if not override.startswith((OWN, LENGTH))]
    several = [override.partition("=")[0] for override in own if re.search(r"=.*[,(]", override)]
    digest = hashlib.sha256(os.fsencode("\0".join(own))).hexdigest()[:8]
    return f"{re.sub(UNFIT, '_', ','.join(several))[:READABLE]}-{digest}".lstrip("-")
