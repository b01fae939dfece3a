"""Makes a source, a net with its losses or a sync from conf/ as a run would, with some keys
changed.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from contract import Batch, Context, Objective, RunSettings, Spec
from data.source import settings_of
from models import objective
from utils.command import keys
from utils.command.instantiate import check, make
from utils.plan.needs import Needs, count

OF_THE_RUN = {field.name for field in fields(RunSettings)}


def make_source(choice: str, **changes: Any) -> Any:
    """Makes the source of data=`choice`. Changes are keys of the run, such as `seed`, or of `data`;
    those within a mapping may be given alone.
    """
    run = settings_of(changes)
    own = {key: value for key, value in changes.items() if key not in OF_THE_RUN}
    return make(_checked("data", choice, own), "data", run)


def make_objective(choice: str, spec: Spec, seed: int = 0, **changes: Any) -> Any:
    """Makes the net of arch=`choice` with its losses. Changes are keys of `arch`; those within a
    mapping, such as `loss`, may be given alone. `forward_dtype=auto` is float32.
    """
    arch = _checked("arch", choice, changes)
    if arch.get("forward_dtype") == "auto":
        arch["forward_dtype"] = "float32"
    return objective.make_objective(arch, seed, spec)


def make_sync(choice: str, **changes: Any) -> Any:
    """Makes sync=`choice`; changes are keys of `sync`."""
    return make(_checked("sync", choice, changes), "sync")


def _checked(group: str, choice: str, changes: dict[str, Any]) -> Any:
    config = copy.deepcopy(_composed(f"{group}={choice}"))
    config[group] = OmegaConf.merge(config[group], changes)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return getattr(check(plain), group)


@cache
def _composed(override: str) -> DictConfig:
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        return compose("pretrain", [override])


def needs_of(
    net: Objective,
    remembered: Mapping[str, Tensor],
    averages: bool,
    first_batch: Callable[[range], tuple[Batch, Context]],
) -> Needs:
    """Counts the memory that training a net needs, as `plan` does."""
    train_on = partial(objective.rehearse, net, keep=True)
    return count(net, remembered.values(), averages, first_batch, train_on)
