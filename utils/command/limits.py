"""Checks that need more than one value, or a look at the disk."""

from __future__ import annotations

import os
import re
from math import ceil
from pathlib import Path

from utils.command.keys import fields_of, find, marked
from utils.command.marks import A_PATH
from utils.command.root import Config
from utils.errors import ConfigError, short
from utils.ranks.launchers import Launch

PATH_SHOWN = 300  # characters: a path cut like other values would lose the end that is mistyped


def check_combinations(config: Config, launch: Launch) -> None:
    """Raises ConfigError for the first values that do not go together."""
    batch, shards, micro = config.global_batch_size, config.shards, config.micro_batch_size
    ranks, interval = launch.world_size, config.eval_interval
    size = batch // shards if batch else None  # without a batch the data decides on its size
    if batch and batch % shards:
        raise ConfigError(
            f"global_batch_size={batch} is not a multiple of shards={shards}; try"
            f" {batch + shards - batch % shards}"
        )
    if ranks > shards:
        raise ConfigError(
            f"shards={shards} is less than the {ranks} ranks that were started; try shards={ranks}"
        )
    if cards := config.plan_cards:
        if config.plan != "show":
            raise ConfigError(f"plan_cards={cards}: is for plan=show; add it")
        if not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*(\.\d+)?", cards, re.ASCII):
            raise ConfigError(
                f"plan_cards={short(cards)}: write a number of equal GPUs and their GiB, as 8x80"
            )
    if config.plan and isinstance(micro, int):
        raise ConfigError(
            f"micro_batch_size={micro}: plan={config.plan} chooses it; remove one of them"
        )
    # kinds of data may know other lengths, as max_tokens
    lengths = [value for key, value in config if key == "epochs" or key.startswith("max_")]
    if all(value is None for value in lengths) and not config.eval_only:
        raise ConfigError("epochs=null: nothing says how long the run is; give epochs or max_steps")
    if interval and config.epochs and config.epochs % interval:
        fits = next(n for n in range(min(interval, config.epochs), 0, -1) if config.epochs % n == 0)
        raise ConfigError(
            f"eval_interval={interval} does not divide epochs={config.epochs}; try"
            f" eval_interval={fits} or epochs={config.epochs + interval - config.epochs % interval}"
        )
    if config.eval_only != (config.checkpoint is not None):
        raise ConfigError(
            f"eval_only={short(config.eval_only)}, checkpoint={short(config.checkpoint)}: give both"
            " to evaluate weights, or neither"
        )
    check_sync(config, ranks, size)


def check_sync(config: Config, ranks: int, shard_size: int | None) -> None:
    """Checks the micro-batch, what the sync cannot do, and how many ranks it can do it on."""
    shards, micro = config.shards, config.micro_batch_size
    if shard_size and isinstance(micro, int) and micro < shard_size:
        raise ConfigError(
            f"micro_batch_size={micro} is less than one shard of {shard_size} examples; raise it to"
            f" {shard_size}, or raise shards={shards}, which makes another run"
        )
    sync = find(config.sync, "sync")
    name = sync.__module__.rpartition(".")[2]
    if config.exact:
        if "exact" not in config.sync:
            raise ConfigError(
                f"exact=true: sync={name} adds gradients in another order; use sync=allreduce"
            )
        # whole branches of a binary tree on every rank
        possible = [n for n in (2**i for i in range(shards.bit_length())) if shards % n == 0]
        if ranks not in possible:
            raise ConfigError(
                f"exact=true on {ranks} ranks: with shards={shards} it takes"
                f" {', '.join(map(str, possible))} ranks; start one of these"
            )
    if not getattr(sync, "splits_weights", False):
        return
    if micro == "auto" and not config.plan:
        raise ConfigError(
            "micro_batch_size=auto: ranks may find different numbers, which"
            f" sync={name} cannot; give a number, or null for all"
        )
    # ranks fetch weights from each other in every forward, so all need as many of them
    if shard_size and isinstance(micro, int):
        at_once = micro // shard_size
        if ceil(shards // ranks / at_once) != ceil(ceil(shards / ranks) / at_once):
            raise ConfigError(
                f"micro_batch_size={micro} on {ranks} ranks: with sync={name} all have equally many"
                f" micro-batches; start a number of ranks that divides shards={shards}, or use"
                " micro_batch_size=null"
            )


def check_paths(config: Config) -> None:
    """Raises ConfigError for the first path that cannot be what its key needs.

    The content of files is checked when they are read.
    """
    plain = config.plain()
    for path, value in marked(plain, fields_of(plain), A_PATH):
        if path == "data_path" and config.eval_only:
            continue  # what the user asks may need no dataset; if it does, the source says so
        # a crash may have left a step folder under another name, which readers find
        stays = isinstance(value, str) and not Path(value).name.startswith("step_")
        if stays and value != "auto" and not os.path.exists(value):
            built = path.startswith("data_path")
            how = "; python -m data.build.NAME builds one, see data/README.md" if built else ""
            raise ConfigError(
                f"{path}={short(value, PATH_SHOWN)}: no such file or folder that you may read{how}"
            )
    folder = Path(config.checkpoint_path).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"checkpoint_path={short(config.checkpoint_path, PATH_SHOWN)}: {there} is not a"
            " folder that you may write to"
        )
