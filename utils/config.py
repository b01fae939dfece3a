"""From the command line to one checked, resolved configuration. Imports no torch: errors must come fast."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.errors import ConfigError
from utils.launchers import Launch

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("arch", "data", "optim", "sync")

# The types of keys whose default is null (they stay optional), and of the one that may be made null.
OPTIONAL: dict[str, type] = {
    "data_path": str, "data_paths": list, "data_paths_test": list, "checkpoint": str, "checkpoint_path": str,
    "project_name": str, "run_name": str, "objective_metric": str, "max_steps": int, "eval_interval": int,
    "micro_batch_size": int, "eval_batch_size": int, "grad_clip": float, "init_from": str,
    "checkpoint_interval": int, "checkpoint_minutes": float, "keep": int,
}  # fmt: skip
CHOICES: dict[str, tuple] = {
    "compile": ("auto", True, False),
    "on_nonfinite": ("raise", "skip"),
    "wandb.mode": ("auto", "online", "offline", "disabled"),
}
POSITIVE = (
    "global_batch_size", "shards", "epochs", "eval_interval", "max_steps", "micro_batch_size", "eval_batch_size", "log_interval",
    "checkpoint_interval", "keep",
)  # fmt: skip
# Keys that say how a run is watched, kept or computed: the derived name, and so the run, is the same without them.
NOT_THE_RUN = (
    "project_name", "run_name", "checkpoint_path", "resume", "checkpoint_interval", "checkpoint_minutes", "checkpoint_every_eval", "keep",
    "wandb", "log_interval", "objective_metric", "eval_save_outputs", "eval_batch_size", "eval_only", "checkpoint",
    "num_workers", "timeout_s", "device", "backend", "compile", "micro_batch_size", "on_nonfinite",
)  # fmt: skip
NAMES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", list: "a list like [a,b]", dict: "a group of keys"}


def resolve(config: DictConfig, choices: dict[str, str], launch: Launch, job: int | None = None) -> DictConfig:
    """Check every key, value and combination and name the run; raises ConfigError."""
    config = OmegaConf.create({key: value for key, value in config.items() if key != "hydra"})
    config.pop("experiment", None)
    check_keys(config, template(choices), "")
    OmegaConf.resolve(config)
    check_combinations(config, launch)
    name_run(config, choices, job)
    return config


def publish(config: DictConfig, dist: Any) -> DictConfig:
    """Rank 0's configuration on every rank, as text."""
    return OmegaConf.create(dist.broadcast_text(OmegaConf.to_yaml(config)))


def template(choices: dict[str, str]) -> DictConfig:
    """The defaults as written in conf/: the one list of known keys and their types."""
    base: Any = OmegaConf.load(CONF / "pretrain.yaml")
    for key in ("defaults", "hydra"):
        del base[key]
    for group in GROUPS:
        base[group] = OmegaConf.load(CONF / group / f"{choices[group]}.yaml")
    return base


def check_keys(config: DictConfig, known: DictConfig, prefix: str) -> None:
    """Every key must be known and have its default's type; whole numbers written as 1e3 are made whole."""
    if missing := [str(key) for key in known if key not in config]:
        raise ConfigError(f"{prefix}{missing[0]}: every key is needed and this one was deleted; remove ~{prefix}{missing[0]}")
    for key in (str(name) for name in config):
        path, default = prefix + key, known._get_node(key) if key in known else None
        raw = config._get_node(key)
        if key not in known:
            raise ConfigError(f"{path}={_short(config[key])}: unknown key{_nearest(path, _all_keys(known, prefix))}")
        if isinstance(default, DictConfig) and isinstance(raw, DictConfig):
            check_keys(raw, default, f"{path}.")
        elif root_key := _followed(default):
            if not _is_interpolation(raw):
                raise ConfigError(f"{path}={_short(config[key])}: follows {root_key}; set {root_key} instead")
        elif not (_is_interpolation(raw) or (isinstance(default, DictConfig | ListConfig) and isinstance(raw, type(default)))):
            config[key] = _checked(path, config[key], known[key], default)


def _checked(path: str, value: Any, default: Any, node: Any) -> Any:
    if path in CHOICES:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in CHOICES[path]):
            raise ConfigError(f"{path}={value}: choose one of {', '.join(str(c).lower() for c in CHOICES[path])}")
        return value
    wanted = OPTIONAL.get(path) or (list if isinstance(node, ListConfig) else dict if isinstance(node, DictConfig) else type(default))
    if (value is None and (path in OPTIONAL or default is None)) or wanted is type(None):
        return value
    if path == "resume":
        return "auto" if value is True else value if value is False else str(value)
    if path == "micro_batch_size" and value == "auto":
        return value
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if wanted is str and isinstance(value, int | float):
        return str(value)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    fits = isinstance(value, wanted) if wanted in (bool, str) else isinstance(value, int) and numeric if wanted is int else numeric
    if wanted in (list, dict):
        fits = isinstance(value, ListConfig | list) and wanted is list
    elif numeric:
        fits = fits and math.isfinite(value)
    if not fits:
        raise ConfigError(
            f"{path}={_short(value)}: must be {NAMES[wanted]}" + (f", for example {default}" if default not in (None, "") else "")
        )
    return float(value) if wanted is float else value


def check_combinations(config: DictConfig, launch: Launch) -> None:
    """What each value allows the others to be."""
    for key in POSITIVE:
        if isinstance(config[key], int) and config[key] < 1:
            raise ConfigError(f"{key}={config[key]}: must be at least 1")
    batch, shards = config.global_batch_size, config.shards
    if batch % shards:
        raise ConfigError(f"global_batch_size={batch} is not a multiple of shards={shards}; try {batch + shards - batch % shards}")
    if launch.world_size > shards:
        raise ConfigError(f"shards={shards} is less than the {launch.world_size} ranks that were started; try shards={launch.world_size}")
    micro = config.micro_batch_size
    if isinstance(micro, int) and micro < batch // shards:
        raise ConfigError(f"micro_batch_size={micro} is less than one shard of {batch // shards} examples; raise it, or shards={shards}")
    interval = config.eval_interval
    if interval is not None and config.epochs % interval:
        fix = f"eval_interval={config.epochs}" if interval > config.epochs else f"epochs={-(-config.epochs // interval) * interval}"
        raise ConfigError(f"eval_interval={interval} does not divide epochs={config.epochs}; try {fix}")
    if config.data_path is not None and config.data_paths is not None:
        raise ConfigError(f"data_path={config.data_path} and data_paths={config.data_paths} are both given; keep one")
    for key in ("data_paths", "data_paths_test"):
        if config[key] is not None and key not in config.data:
            raise ConfigError(f"{key}={_short(config[key])}: this data reads no such key; use data_path, or data=puzzles")
        if config[key] is not None and not all(isinstance(path, str) for path in config[key]):
            raise ConfigError(f"{key}={_short(config[key])}: must be a list of folders")
    if config.eval_only and config.checkpoint is None:
        raise ConfigError("eval_only=true needs weights to evaluate; add checkpoint=<run directory, checkpoint or .safetensors file>")
    if config.checkpoint is not None and not config.eval_only:
        raise ConfigError(f"checkpoint={config.checkpoint} is used by eval_only=true alone; add it, or remove checkpoint")
    if config.exact:
        check_exact(config, launch)
    if len(config.evaluators):
        raise ConfigError(f"evaluators={config.evaluators}: there are none beside the built-in evaluation; use evaluators=[]")
    for key in ("beta1", "beta2", "ema_rate"):
        if not 0 <= config[key] < 1:
            raise ConfigError(f"{key}={config[key]}: must be at least 0 and less than 1")
    for key in ("lr", "puzzle_emb_lr", "weight_decay", "puzzle_emb_weight_decay", "lr_warmup_steps", "num_workers"):
        if config[key] < 0:
            raise ConfigError(f"{key}={config[key]}: must not be negative")
    for key in ("timeout_s", "grad_clip", "checkpoint_minutes"):
        if config[key] is not None and config[key] <= 0:
            raise ConfigError(f"{key}={config[key]}: must be more than 0")


def check_exact(config: DictConfig, launch: Launch) -> None:
    """What bitwise equality asks for: whole branches of a binary tree on every rank, one shard at a time."""
    ranks, shards, micro = launch.world_size, config.shards, config.micro_batch_size
    possible = [str(n) for n in (2**power for power in range(shards.bit_length())) if shards % n == 0]
    if str(ranks) not in possible:
        raise ConfigError(f"exact=true on {ranks} ranks: with shards={shards} it takes {', '.join(possible)} ranks; start one of these")
    if isinstance(micro, int) and micro != config.global_batch_size // shards:
        raise ConfigError(f"micro_batch_size={micro}: exact=true computes one shard at a time; use micro_batch_size=null")


def name_run(config: DictConfig, choices: dict[str, str], job: int | None) -> None:
    """The same configuration has the same name, so that the same command finds its own run."""
    path = config.data_path or (config.data_paths[0] if config.data_paths else None)
    config.project_name = config.project_name or (Path(path).name if path else choices["data"])
    if config.run_name is None:
        content = OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key not in NOT_THE_RUN]), sort_keys=True)
        config.run_name = f"{choices['arch']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    elif job is not None:  # jobs of a sweep that share a name must not share a directory
        config.run_name = f"{config.run_name}-{job}"
    if config.eval_only:  # beside the run that it evaluates, and never in its place
        config.run_name += "-evaluation"
    config.checkpoint_path = config.checkpoint_path or f"runs/{config.project_name}/{config.run_name}"


def explain(error: BaseException) -> str:
    """One line for what Hydra or OmegaConf found wrong; empty when the error is not theirs."""
    from hydra.errors import HydraException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return ""
    text = str(error)
    if found := re.search(r"Could not find '(\w+)/([^']*)'", text):
        group, name = found.groups()
        options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return f"{group}={name}: unknown; choose one of {', '.join(options)}" if options else f"{group}={name}: unknown key"
    if found := re.search(r"Could not (?:override|append|delete)[^']*'([^'=]+)(?:=([^']*))?'", text):
        key, value = found.groups()
        value = value or next(iter(re.findall(rf"\+{re.escape(key)}=(\S+)", text)), None)
        return f"{key}{'=' + value if value else ''}: unknown key{_nearest(key, _every_key())}"
    if found := re.search(r"[Ee]rror parsing override '([^']*)'", text):
        return f"{found.group(1)}: cannot be read; write key=value, with quotes around special characters: 'key=\"a,b\"'"
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return f"{found.group(1)}: several values; add -m to run them all, or write a list as key=[a,b]"
    return " ".join(text.split())


def _all_keys(known: DictConfig, prefix: str) -> list[str]:
    return [prefix + str(key) for key in known]


def _every_key() -> list[str]:
    keys = [*map(str, OmegaConf.load(CONF / "pretrain.yaml")), "experiment"]
    for group in GROUPS:
        for path in (CONF / group).glob("*.yaml"):
            keys += [f"{group}.{key!s}" for key in OmegaConf.load(path)]
    return [key for key in keys if key not in ("defaults", "hydra")]


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; conf/pretrain.yaml lists all keys"


def _followed(default: Any) -> str:
    """The root key whose value this one always has; empty for other keys, and for `${.neighbour}`, which is only a default."""
    text = str(default._value()) if _is_interpolation(default) else ""
    return "" if text.startswith("${.") else text[2:-1]


def _is_interpolation(node: Any) -> bool:
    return node is not None and node._is_interpolation()


def _short(value: Any) -> str:
    text = str(OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value)
    return text if len(text) <= 60 else text[:57] + "..."
