"""Composes the configuration of a single run, once.

`hydra.main` composes it twice, the first time to learn whether the command is a sweep; and it has
to be known before the program's own imports, so that errors come fast, and again after them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

NAME = "pretrain"  # of the program and of its configuration
OF_SWEEPS = "hydra.sweep."  # a single run reads nothing of it
# the settings of a run for which Hydra has nothing to do but to compose
IDLE: dict[str, Any] = {
    "mode": None,
    "callbacks": {},
    "hydra_logging.root": None,
    "job.env_set": {},
    "job_logging.root": None,
    "output_subdir": None,
    "run.dir": ".",
    "verbose": False,
}


def release() -> None:
    """Undoes what `compose_single_run` leaves of Hydra's state, so that `hydra.main` can begin."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()


def compose_single_run(arguments: Sequence[str]) -> DictConfig | None:
    """Returns the configuration of these arguments, with Hydra's own part, and leaves Hydra as
    `hydra.main` would inside a job.

    Returns None, and leaves Hydra as it was, if the arguments, or the files that they choose, ask
    Hydra for more than a configuration. Only `hydra.main` does the rest.
    """
    overrides = [argument for argument in arguments if not argument.startswith(OF_SWEEPS)]
    if any(argument.startswith("-") or "hydra" in argument for argument in overrides):
        return None
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from utils.command.keys import CONF

    initialize_config_dir(str(CONF), job_name=NAME, version_base="1.3")
    raw = compose(NAME, overrides, return_hydra_config=True)
    if any(OmegaConf.select(raw.hydra, path) != idle for path, idle in IDLE.items()):
        GlobalHydra.instance().clear()
        return None
    OmegaConf.update(raw, "hydra.runtime.output_dir", os.getcwd(), force_add=True)
    HydraConfig.instance().set_config(raw)
    return raw
