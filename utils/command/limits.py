"""What the values of several keys allow each other to be."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from utils.command.values import leaves
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

WRAPPERS = ("ddp", "fsdp")  # ways to synchronise that PyTorch brings
MOST = 1e30  # of any number: float32 must hold it, and what optimizers make of it


def check_combinations(config: DictConfig, launch: Launch) -> None:
    """Raises ConfigError for the first that does not go with the others."""
    for path, value in leaves(OmegaConf.to_container(config)):
        if isinstance(value, float) and abs(value) > MOST:
            raise ConfigError(f"{path}={value}: must be at most {MOST:g}")
    batch, shards = config.global_batch_size, config.shards
    # without a batch the data decides on its size, and checks it
    if batch is not None and batch % shards:
        raise ConfigError(f"global_batch_size={batch} is not a multiple of shards={shards}; try {batch + shards - batch % shards}")
    if launch.world_size > shards:
        raise ConfigError(f"shards={shards} is less than the {launch.world_size} ranks that were started; try shards={launch.world_size}")
    micro = config.micro_batch_size
    if isinstance(micro, int) and batch is not None and micro < batch // shards:
        raise ConfigError(f"micro_batch_size={micro} is less than one shard of {batch // shards} examples; raise it, or shards={shards}")
    if config.plan_cards is not None and config.plan != "show":
        raise ConfigError(f"plan_cards={config.plan_cards}: says for which GPUs plan=show plans; add it, or remove plan_cards")
    if config.plan and isinstance(micro, int):
        raise ConfigError(f"micro_batch_size={micro}: is what plan={config.plan} is to find; remove one of them")
    interval = config.eval_interval
    if all(config[key] is None for key in map(str, config) if key == "epochs" or key.startswith("max_")):  # kinds of data may know others
        raise ConfigError("epochs=null: nothing says how long the run is; give epochs or max_steps")
    if interval is not None and config.epochs is not None and config.epochs % interval:
        fix = f"eval_interval={config.epochs}" if interval > config.epochs else f"epochs={-(-config.epochs // interval) * interval}"
        raise ConfigError(f"eval_interval={interval} does not divide epochs={config.epochs}; try {fix}")
    if config.eval_only and config.checkpoint is None:
        raise ConfigError("eval_only=true needs weights to evaluate; add checkpoint=<run directory, checkpoint or .safetensors file>")
    if config.checkpoint_path is not None and Path(config.checkpoint_path).name in ("", ".."):
        raise ConfigError(f"checkpoint_path={config.checkpoint_path}: must end with a name of its own; for example runs/mine")
    if config.checkpoint is not None and not config.eval_only:
        raise ConfigError(f"checkpoint={config.checkpoint} is used by eval_only=true alone; add it, or remove checkpoint")
    if config.objective_metric is not None and not config.objective_metric.removeprefix("-"):
        raise ConfigError(f"objective_metric={config.objective_metric}: names no metric; for example -eval/lm_loss")
    if config.exact and (way := way_of(config)) in WRAPPERS:
        raise ConfigError(f"exact=true: sync={way} adds gradients in an order of its own; use sync=allreduce")
    if way_of(config) == "fsdp":
        check_fsdp(config)
    if batch is not None:
        check_passes(config, launch.world_size, batch // shards)
    if config.exact:
        check_exact(config, launch)


def way_of(config: DictConfig) -> str:
    """How ranks synchronise: the name of the module."""
    return str(config.sync.get("_target_")).split(".")[-2:][0]


def check_fsdp(config: DictConfig) -> None:
    """Weights lie split over ranks, and each finds out by itself what fits."""
    if config.micro_batch_size == "auto" and not config.plan:
        raise ConfigError("micro_batch_size=auto: ranks may find different numbers, which sync=fsdp cannot; give a number, or null for all")
    if config.compile == "max":
        raise ConfigError("compile=max: sync=fsdp moves weights, which CUDA graphs expect in their places; use compile=true")
    if "optim.builtin.muon" in dict(leaves(OmegaConf.to_container(config.optim))).values():
        raise ConfigError("optim=muon: needs whole matrices, and sync=fsdp splits them; use sync=ddp, sync=allreduce or optim=adamw")


def check_passes(config: DictConfig, ranks: int, shard_size: int) -> None:
    """Under fsdp ranks fetch weights from each other in every forward, so they must go through equally many."""
    shards, micro = config.shards, config.micro_batch_size
    if way_of(config) != "fsdp" or not isinstance(micro, int) or micro < shard_size:
        return
    at_once = micro // shard_size
    right = [n for n in range(1, shards + 1) if ceil(shards // n / at_once) == ceil(ceil(shards / n) / at_once)]
    if ranks not in right:
        near = " or ".join(str(n) for n in (max(filter(ranks.__gt__, right)), min(filter(ranks.__lt__, right))))
        raise ConfigError(
            f"micro_batch_size={micro} on {ranks} ranks: with sync=fsdp all have equally many micro-batches, "
            f"and shards={shards} are cut into more on some; start {near} ranks, or use micro_batch_size=null"
        )


def check_exact(config: DictConfig, launch: Launch) -> None:
    """What bitwise equality asks for: whole branches of a binary tree on every rank, one shard at a time."""
    ranks, shards, micro = launch.world_size, config.shards, config.micro_batch_size
    possible = [str(n) for n in (2**power for power in range(shards.bit_length())) if shards % n == 0]
    if str(ranks) not in possible:
        raise ConfigError(f"exact=true on {ranks} ranks: with shards={shards} it takes {', '.join(possible)} ranks; start one of these")
    if isinstance(micro, int) and (config.global_batch_size is None or micro != config.global_batch_size // shards):
        raise ConfigError(f"micro_batch_size={micro}: exact=true computes one shard at a time; use micro_batch_size=null")
