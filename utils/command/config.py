"""From the command line to one checked, resolved configuration. Imports no torch: errors must come fast."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.command.instantiate import check_special, is_special
from utils.command.limits import check_combinations
from utils.command.naming import check_name, folder_name, job_name
from utils.command.values import checked, is_interpolation, leaves, nearest, short
from utils.errors import ConfigError
from utils.files import ROOT
from utils.ranks.launchers import Launch

CONF = ROOT / "conf"
GROUPS = ("arch", "data", "optim", "sync")

# Keys that say how a run is watched, kept or computed: the derived name, and so the run, is the same without them.
NOT_THE_RUN = (
    "project_name", "run_name", "checkpoint_path", "resume", "checkpoint_interval", "checkpoint_minutes", "checkpoint_every_eval", "keep",
    "wandb", "log_interval", "objective_metric", "eval_save_outputs", "eval_batch_size", "eval_only", "checkpoint",
    "num_workers", "timeout_s", "device", "backend", "compile", "micro_batch_size", "on_nonfinite",
)  # fmt: skip
Plain = dict[str, Any]


def resolve(config: DictConfig, choices: Mapping[str, str], launch: Launch, overrides: Sequence[str] | None = None) -> DictConfig:
    """Check every key, value and combination and name the run; raises ConfigError. `overrides`: those of a job of a sweep."""
    given: Any = OmegaConf.to_container(config, resolve=False)
    known = template(choices)
    # Twice: a value must have its proper type before others are filled in with it, and theirs is known only then.
    mine = [key for key in given if key not in ("hydra", "experiment")]
    given = check_keys({key: given[key] for key in sorted(mine, key=GROUPS.__contains__)}, known)  # what a group takes over comes first
    config = OmegaConf.create(check_keys(filled_in(given), known))
    OmegaConf.resolve(config)
    check_combinations(config, launch)
    name_run(config, choices, overrides)
    return config


def publish(config: DictConfig, dist: Any) -> DictConfig:
    """Rank 0's configuration on every rank, as text."""
    return OmegaConf.create(dist.broadcast_text(OmegaConf.to_yaml(config)))


def template(choices: Mapping[str, str]) -> DictConfig:
    """The defaults as written in conf/: the one list of known keys and their types."""
    base: Any = OmegaConf.load(CONF / "pretrain.yaml")
    for key in ("defaults", "hydra"):
        del base[key]
    for group in GROUPS:
        check_choice(group, choices.get(group))
        base[group] = OmegaConf.load(CONF / group / f"{choices[group]}.yaml")
    return base


def check_choice(group: str, choice: Any) -> None:
    """Every run has one option of each group, of those in conf/."""
    if choice not in (known := options(group)):
        raise ConfigError(f"{group}={'null' if choice is None else short(choice)}: unknown; choose one of {', '.join(known)}")


def options(group: str) -> list[str]:
    """What a group of conf/ offers."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def check_keys(given: Plain, known: DictConfig, prefix: str = "", root: Plain | None = None) -> Plain:
    """Every key must be known and have its default's type; whole numbers written as 1e3 are made whole. Interpolations are left."""
    root = given if root is None else root
    right: Plain = {}
    if missing := [str(key) for key in known if key not in given]:
        raise ConfigError(f"{prefix}{missing[0]}: every key is needed and this one was deleted; remove ~{prefix}{missing[0]}")
    for key, value in given.items():
        path, default = f"{prefix}{key}", known._get_node(str(key)) if str(key) in known else None
        if is_special(key) and not is_interpolation(value):
            check_special(path, value)
        if default is None:
            raise ConfigError(f"{path}={short(value)}: unknown key{nearest(path, [f'{prefix}{name!s}' for name in known])}")
        if isinstance(default, DictConfig) and isinstance(value, dict):
            right[key] = check_keys(value, default, f"{path}.", root)
        elif followed := _followed(default):
            if not is_interpolation(value) and value != root[followed]:
                raise ConfigError(f"{path}={short(value)}: follows {followed}; set {followed} instead")
            right[key] = value if is_interpolation(value) else f"${{{followed}}}"
        else:
            right[key] = value if is_interpolation(value) else checked(path, value, known[key], default)
    return right


def filled_in(given: Plain) -> Plain:
    """Every interpolation replaced by what it stands for."""
    try:
        filled: Any = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        key = str(getattr(error, "full_key", None) or "")
        said = dict(leaves(given)).get(key)
        raise ConfigError(f"{key}={short(said)}: {_reason(error)}") from None
    for path, value in leaves(filled):
        if is_interpolation(value):
            raise ConfigError(f"{path}={short(value)}: ${{ begins an interpolation and no value; remove it")
    return filled


def name_run(config: DictConfig, choices: Mapping[str, str], overrides: Sequence[str] | None) -> None:
    """The same configuration has the same name, so that the same command finds its own run."""
    path = config.data_path or (config.data_paths[0] if config.data_paths else None)
    if config.run_name is not None:
        check_name("run_name", config.run_name)
    config.project_name = config.project_name or (folder_name(path) if path else "") or choices["data"]
    if config.run_name is None:
        content = OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key not in NOT_THE_RUN]), sort_keys=True)
        config.run_name = f"{choices['arch']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    elif overrides is not None:  # jobs of a sweep that share a name must not share a directory
        config.run_name = job_name(config.run_name, config, choices, overrides, NOT_THE_RUN)
    if config.eval_only:  # beside the run that it evaluates, and never in its place
        config.run_name += "-evaluation"
    check_name("project_name", config.project_name)
    config.checkpoint_path = config.checkpoint_path or f"runs/{config.project_name}/{config.run_name}"


def _followed(default: Any) -> str:
    """The root key whose value this one always has; empty for other keys, and for `${.neighbour}`, which is only a default."""
    text = str(default._value()) if default._is_interpolation() else ""
    return "" if text.startswith("${.") else text[2:-1]


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if found := re.search(r"Environment variable '(.*)' not found", text):
        return f"the environment variable {found[1]} is not set; export it, or give the value itself"
    if found := re.search(r"Interpolation key '(.*)' not found|Error resolving key '(.*)'", text):
        return f"there is no key {found[1] or found[2]}"
    if isinstance(error, RecursionError) or "Recursive interpolation" in text or "parent node" in text:
        return "leads back to itself; give a value"
    return f"cannot be read as an interpolation ({text.removeprefix('GrammarParseError raised while resolving interpolation: ')})"
