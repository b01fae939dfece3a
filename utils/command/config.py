"""From what Hydra composed to one checked, resolved, named configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from utils.command import keys
from utils.command.keys import GROUPS, Plain, fields_of, is_marked, leaves, marked
from utils.command.limits import check_combinations
from utils.command.marks import NAMES_PROJECT, SAME_RUN
from utils.command.naming import check_name, folder_name, job_name
from utils.errors import ConfigError
from utils.ranks.launchers import Launch


def resolve(
    config: DictConfig,
    choices: Mapping[str, str],
    launch: Launch,
    overrides: Sequence[str] | None = None,
) -> DictConfig:
    """Checks every key, value and combination, and names the run; raises ConfigError.

    `overrides` are those of a job of a sweep.
    """
    for group in GROUPS:
        if not isinstance(choices.get(group), str):
            raise ConfigError(
                f"{group}={choices.get(group)}: choose one; --help {group} lists them"
            )
    written = _plain(config, resolve=False)
    checked = keys.check(_plain(config, resolve=True))
    made = OmegaConf.create(checked)
    check_combinations(made, launch)
    if made.sweep.only is not None and overrides is None:
        raise ConfigError(f"sweep.only={made.sweep.only}: chooses a job of a sweep; add -m")
    name_run(made, written, choices, overrides)
    return made


def publish(config: DictConfig, dist: Any) -> DictConfig:
    """Sends rank 0's configuration to every rank, as text."""
    return OmegaConf.create(dist.broadcast_text(OmegaConf.to_yaml(config)))


def _plain(config: DictConfig, resolve: bool) -> Plain:
    own = OmegaConf.masked_copy(config, [key for key in map(str, config) if key != "hydra"])
    plain: Any = OmegaConf.to_container(own, resolve=resolve)
    return plain


def name_run(
    config: DictConfig, written: Plain, choices: Mapping[str, str], overrides: Sequence[str] | None
) -> None:
    """Names the run after its configuration, so that the same command finds its own run.

    `written` is the configuration with its interpolations.
    """
    plain: Any = OmegaConf.to_container(config)
    fields = fields_of(plain)
    named_after = marked(plain, fields, NAMES_PROJECT)
    key, data = next(((key, value) for key, value in named_after if value), ("", None))
    if config.run_name is not None:
        check_name("run_name", config.run_name)
    if data and not config.project_name:
        config.project_name = folder_name(data)
        if config.project_name:
            check_name(key, config.project_name)
    config.project_name = config.project_name or choices["data"]
    if config.run_name is None:
        content = json.dumps(_differences(plain, written, choices), sort_keys=True)
        config.run_name = f"{choices['arch']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    elif overrides is not None:  # jobs of a sweep that share a name must not share a directory
        config.run_name = job_name(config.run_name, config, choices, overrides, fields)
    if config.eval_only:  # beside the run that it evaluates, and never in its place
        config.run_name += "-evaluation"
    check_name("project_name", config.project_name)
    config.checkpoint_path = (
        config.checkpoint_path or f"runs/{config.project_name}/{config.run_name}"
    )


def _differences(config: Plain, written: Plain, choices: Mapping[str, str]) -> Plain:
    """Returns the choices, and the values that differ from their defaults: a key that is new does
    not rename old runs.
    """
    chosen = {group: choices[group] for group in GROUPS if group != "sync"}
    default = compose("pretrain", [f"{group}={choice}" for group, choice in chosen.items()])
    # lists are compared whole
    defaults = dict(leaves(_plain(default, resolve=False), into_lists=False))
    fields = fields_of(config)
    values = dict(leaves(config, into_lists=False))
    now = dict(leaves(written, into_lists=False))
    differing = {
        path: values.get(path)
        for path in now.keys() | defaults.keys()
        if now.get(path) != defaults.get(path)
        and values.get(path) != defaults.get(path)
        and not is_marked(path, fields, SAME_RUN)
        and path.partition(".")[0] not in ("sync", "experiment")
    }
    return chosen | differing
