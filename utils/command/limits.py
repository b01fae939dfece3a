"""Checks that need more than one value, or a look at the disk."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from utils.command.instantiate import literals_of
from utils.command.keys import fields_of, is_marked, leaves
from utils.command.marks import A_PATH
from utils.errors import ConfigError, brief, short
from utils.gpus import gib_of_each
from utils.ranks.launchers import Launch

PATH_SHOWN = 300  # characters: a path cut like other values would lose the end that is mistyped


@dataclass(frozen=True)
class SyncTraits:
    """The traits that a sync states about itself; see `optim/sync/base.py`."""

    name: str
    splits_weights: bool
    can_be_exact: bool  # its configuration has the key `exact`


def traits_of(sync: DictConfig) -> SyncTraits:
    """Returns the traits of the configured sync without importing it."""
    target = str(sync.get("_target_"))
    stated = literals_of("sync", target)
    module = target.split(".")[-2]
    return SyncTraits(
        name=stated.get("name", module),
        splits_weights=stated.get("splits_weights", False),
        can_be_exact="exact" in sync,
    )


def check_combinations(config: DictConfig, launch: Launch) -> None:
    """Raises ConfigError for the first values that do not go together."""
    batch, shards = config.global_batch_size, config.shards
    # without a batch the data decides on its size, and checks it
    if batch is not None and batch % shards:
        raise ConfigError(
            f"global_batch_size={batch} is not a multiple of shards={shards}; try"
            f" {batch + shards - batch % shards}"
        )
    if launch.world_size > shards:
        raise ConfigError(
            f"shards={shards} is less than the {launch.world_size} ranks that were started; try"
            f" shards={launch.world_size}"
        )
    micro = config.micro_batch_size
    if isinstance(micro, int) and batch is not None and micro < batch // shards:
        size = max(size for size in range(1, micro + 1) if batch % size == 0)
        raise ConfigError(
            f"micro_batch_size={micro} is less than one shard of {batch // shards} examples; raise"
            f" it to {batch // shards}, or raise shards={shards} to {batch // size}, which makes"
            " another run"
        )
    if config.plan_cards is not None and config.plan != "show":
        raise ConfigError(
            f"plan_cards={config.plan_cards}: says for which GPUs plan=show plans; add it, or"
            " remove plan_cards"
        )
    if config.plan_cards is not None:
        gib_of_each(config.plan_cards)
    if config.plan and isinstance(micro, int):
        raise ConfigError(
            f"micro_batch_size={micro}: is what plan={config.plan} is to find; remove one of them"
        )
    interval = config.eval_interval
    # kinds of data may know others
    if all(
        config[key] is None for key in map(str, config) if key == "epochs" or key.startswith("max_")
    ):
        raise ConfigError("epochs=null: nothing says how long the run is; give epochs or max_steps")
    if interval is not None and config.epochs is not None and config.epochs % interval:
        fix = (
            f"eval_interval={config.epochs}"
            if interval > config.epochs
            else f"epochs={-(-config.epochs // interval) * interval}"
        )
        raise ConfigError(
            f"eval_interval={interval} does not divide epochs={config.epochs}; try {fix}"
        )
    if config.eval_only and config.checkpoint is None:
        raise ConfigError(
            "eval_only=true needs weights to evaluate; add checkpoint=<run directory, checkpoint or"
            " .safetensors file>"
        )
    if config.checkpoint_path is not None and Path(config.checkpoint_path).name in ("", ".."):
        raise ConfigError(
            f"checkpoint_path={config.checkpoint_path}: must end with a name of its own; for"
            " example runs/mine"
        )
    if config.checkpoint is not None and not config.eval_only:
        raise ConfigError(
            f"checkpoint={config.checkpoint} is used by eval_only=true alone; add it, or remove"
            " checkpoint"
        )
    if config.objective_metric is not None and not config.objective_metric.removeprefix("-"):
        raise ConfigError(
            f"objective_metric={config.objective_metric}: names no metric; for example"
            " -eval/lm_loss"
        )
    sync = traits_of(config.sync)
    if config.exact and not sync.can_be_exact:
        raise ConfigError(
            f"exact=true: sync={sync.name} adds gradients in an order of its own; use"
            " sync=allreduce"
        )
    if sync.splits_weights:
        check_split_weights(config, sync.name)
    if batch is not None:
        check_passes(config, launch.world_size, batch // shards)
    if config.exact:
        check_exact(config, launch)


def check_split_weights(config: DictConfig, sync: str) -> None:
    """Refuses what needs whole weights on every rank; `sync` is the name of what splits them."""
    if config.micro_batch_size == "auto" and not config.plan:
        raise ConfigError(
            "micro_batch_size=auto: ranks may find different numbers, which"
            f" sync={sync} cannot; give a number, or null for all"
        )
    if config.compile == "max":
        raise ConfigError(
            f"compile=max: sync={sync} moves weights, which CUDA graphs expect in their places; use"
            " compile=true"
        )
    if "optim.builtin.muon" in dict(leaves(OmegaConf.to_container(config.optim))).values():
        raise ConfigError(
            f"optim=muon: needs whole matrices, and sync={sync} splits them; use sync=ddp,"
            " sync=allreduce or optim=adamw"
        )


def check_passes(config: DictConfig, ranks: int, shard_size: int) -> None:
    """Refuses split weights where ranks have different numbers of micro-batches: they fetch
    weights from each other in every forward.
    """
    shards, micro = config.shards, config.micro_batch_size
    sync = traits_of(config.sync)
    if not sync.splits_weights or not isinstance(micro, int) or micro < shard_size:
        return
    at_once = micro // shard_size
    right = [
        n
        for n in range(1, shards + 1)
        if ceil(shards // n / at_once) == ceil(ceil(shards / n) / at_once)
    ]
    if ranks not in right:
        near = " or ".join(
            str(n) for n in (max(filter(ranks.__gt__, right)), min(filter(ranks.__lt__, right)))
        )
        raise ConfigError(
            f"micro_batch_size={micro} on {ranks} ranks: with sync={sync.name} all have equally"
            f" many micro-batches, and shards={shards} are cut into more on some; start {near}"
            " ranks, or use micro_batch_size=null"
        )


def check_exact(config: DictConfig, launch: Launch) -> None:
    """Bitwise equality needs whole branches of a binary tree on every rank."""
    ranks, shards = launch.world_size, config.shards
    possible = [
        str(n) for n in (2**power for power in range(shards.bit_length())) if shards % n == 0
    ]
    if str(ranks) not in possible:
        raise ConfigError(
            f"exact=true on {ranks} ranks: with shards={shards} it takes {', '.join(possible)}"
            " ranks; start one of these"
        )


def check_paths(config: DictConfig) -> None:
    """Raises ConfigError for the first path that cannot be what its key needs.

    Only a look: what a file holds is checked when it is read.
    """
    plain: Any = OmegaConf.to_container(config)
    fields = fields_of(plain)
    for path, value in leaves(plain):
        if not isinstance(value, str) or value == "auto" or not is_marked(path, fields, A_PATH):
            continue
        try:
            os.stat(value)
        except FileNotFoundError:
            # a crash may have left a step folder under another name, which readers find
            if not Path(value).name.startswith("step_"):
                built = path.startswith("data_path")
                how = "; python -m data.build.NAME builds one, see data/README.md" if built else ""
                raise ConfigError(
                    f"{path}={short(value, PATH_SHOWN)}: no such file or folder{how}"
                ) from None
        except OSError as error:
            reason = brief(error)
            raise ConfigError(
                f"{path}={short(value, PATH_SHOWN)}: cannot be read ({reason})"
            ) from None
    _check_folder(config.checkpoint_path)


def _check_folder(path: str) -> None:
    try:
        problem = "" if stat.S_ISDIR(os.stat(path).st_mode) else "Not a directory"
    except FileNotFoundError:  # it will be made
        return
    except OSError as error:
        problem = brief(error)
    if problem:
        raise ConfigError(
            f"checkpoint_path={short(path, PATH_SHOWN)}: cannot be made ({problem});"
            " give a folder you may write to"
        )
