"""How large or small each value may be, and what it allows the others to be."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from utils.command.values import leaves, short
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

# At least and at most, with what the bound means to people where the number does not say it.
RANGES: dict[str, tuple[float, float, str]] = {
    "global_batch_size": (1, 10**7, ""),
    "shards": (1, 65536, ""),
    "micro_batch_size": (1, 10**7, ""),
    "eval_batch_size": (1, 10**6, ""),
    "epochs": (1, 10**9, ""),
    "eval_interval": (1, 10**9, ""),
    "max_steps": (1, 10**12, ""),
    "log_interval": (1, 10**12, ""),
    "checkpoint_interval": (1, 10**12, ""),
    "keep": (1, 10**6, "null for all"),
    "seed": (0, 2**63 - 1, ""),
    "lr": (0, 10**6, ""),
    "puzzle_emb_lr": (0, 10**6, ""),
    "weight_decay": (0, 10**6, ""),
    "puzzle_emb_weight_decay": (0, 10**6, ""),
    "lr_warmup_steps": (0, 10**12, ""),
    "num_workers": (0, 256, ""),
    "timeout_s": (0, 30 * 86400, "30 days"),
    "checkpoint_minutes": (0, 30 * 1440, "30 days"),
    "grad_clip": (0, 10**30, ""),
    "sync.bucket_mb": (0, 10**6, ""),
}
MOST = 1e30  # of any number: float32 must hold it, and what optimizers make of it
MORE_THAN = ("timeout_s", "checkpoint_minutes", "grad_clip", "sync.bucket_mb")  # the lower bound itself is too small


def check_ranges(config: DictConfig) -> None:
    """Every number by itself."""
    for key, (least, most, meaning) in RANGES.items():
        value = OmegaConf.select(config, key)
        if not isinstance(value, int | float):
            continue
        if key in MORE_THAN and value <= least:
            raise ConfigError(f"{key}={value}: must be more than {least}")
        if value < least:
            raise ConfigError(f"{key}={value}: must {'not be negative' if least == 0 else f'be at least {least}'}")
        if value > most:
            raise ConfigError(f"{key}={short(value)}: must be at most {most}{f' ({meaning})' if meaning else ''}")
    for path, value in leaves(OmegaConf.to_container(config)):
        if isinstance(value, float) and abs(value) > MOST:
            raise ConfigError(f"{path}={value}: must be at most {MOST:g}")
    for key in ("beta1", "beta2", "ema_rate"):
        if not 0 <= config[key] < 1:
            raise ConfigError(f"{key}={config[key]}: must be at least 0 and less than 1")


def check_combinations(config: DictConfig, launch: Launch) -> None:
    """What each value allows the others to be."""
    check_ranges(config)
    batch, shards = config.global_batch_size, config.shards
    if batch % shards:
        raise ConfigError(f"global_batch_size={batch} is not a multiple of shards={shards}; try {batch + shards - batch % shards}")
    if launch.world_size > shards:
        raise ConfigError(f"shards={shards} is less than the {launch.world_size} ranks that were started; try shards={launch.world_size}")
    micro = config.micro_batch_size
    if isinstance(micro, int) and micro < batch // shards:
        raise ConfigError(f"micro_batch_size={micro} is less than one shard of {batch // shards} examples; raise it, or shards={shards}")
    interval = config.eval_interval
    if config.epochs is None and config.max_steps is None:
        raise ConfigError("epochs=null: nothing says how long the run is; give epochs or max_steps")
    if interval is not None and config.epochs is not None and config.epochs % interval:
        fix = f"eval_interval={config.epochs}" if interval > config.epochs else f"epochs={-(-config.epochs // interval) * interval}"
        raise ConfigError(f"eval_interval={interval} does not divide epochs={config.epochs}; try {fix}")
    if config.data_path is not None and config.data_paths is not None:
        raise ConfigError(f"data_path={config.data_path} and data_paths={config.data_paths} are both given; keep one")
    for key in ("data_paths", "data_paths_test"):
        if config[key] is not None and key not in config.data:
            raise ConfigError(f"{key}={short(config[key])}: this data reads no such key; use data_path, or data=puzzles")
    if config.data_paths is not None and not len(config.data_paths):
        raise ConfigError("data_paths=[]: names no folder to train on; name one, or leave data_paths out")
    if config.eval_only and config.checkpoint is None:
        raise ConfigError("eval_only=true needs weights to evaluate; add checkpoint=<run directory, checkpoint or .safetensors file>")
    if config.checkpoint_path is not None and Path(config.checkpoint_path).name in ("", ".."):
        raise ConfigError(f"checkpoint_path={config.checkpoint_path}: must end with a name of its own; for example runs/mine")
    if config.checkpoint is not None and not config.eval_only:
        raise ConfigError(f"checkpoint={config.checkpoint} is used by eval_only=true alone; add it, or remove checkpoint")
    if config.objective_metric is not None and not config.objective_metric.removeprefix("-"):
        raise ConfigError(f"objective_metric={config.objective_metric}: names no metric; for example -eval/lm_loss")
    if config.exact:
        check_exact(config, launch)
    if len(config.evaluators):
        raise ConfigError(f"evaluators={config.evaluators}: there are none beside the built-in evaluation; use evaluators=[]")


def check_exact(config: DictConfig, launch: Launch) -> None:
    """What bitwise equality asks for: whole branches of a binary tree on every rank, one shard at a time."""
    ranks, shards, micro = launch.world_size, config.shards, config.micro_batch_size
    possible = [str(n) for n in (2**power for power in range(shards.bit_length())) if shards % n == 0]
    if str(ranks) not in possible:
        raise ConfigError(f"exact=true on {ranks} ranks: with shards={shards} it takes {', '.join(possible)} ranks; start one of these")
    if isinstance(micro, int) and micro != config.global_batch_size // shards:
        raise ConfigError(f"micro_batch_size={micro}: exact=true computes one shard at a time; use micro_batch_size=null")
