"""From the command line to one checked, resolved configuration.

Imports no torch: errors must come fast.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.command.keys import CONF as CONF
from utils.command.keys import (
    GROUPS,
    NAMES_PROJECT,
    SAME_RUN,
    Plain,
    Rules,
    defaults_and_rules,
    is_marked,
    run_values,
    unknown,
)
from utils.command.limits import check_combinations, check_divisors
from utils.command.naming import check_name, folder_name, job_name
from utils.command.values import Rule, check_plain, check_value, is_interpolation, leaves
from utils.errors import ConfigError, short
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
    defaults, rules = defaults_and_rules(choices)
    given: Any = OmegaConf.to_container(config, resolve=False)
    if given.get("experiment"):
        key, value = next(leaves(given["experiment"], "experiment"))
        raise ConfigError(
            f"{key}={short(value)}: nothing reads keys below experiment; begin its file"
            " with # @package _global_"
        )
    # groups take over from the root
    keys_in_order = sorted(
        (key for key in given if key not in ("hydra", "experiment")), key=GROUPS.__contains__
    )
    # Twice: a value must have its proper type before others are filled in with it, and theirs is
    # known only then.
    given = check_keys({key: given[key] for key in keys_in_order}, defaults, rules)
    config = OmegaConf.create(check_keys(fill_in(given), defaults, rules))
    OmegaConf.resolve(config)
    check_divisors(config, rules)
    check_combinations(config, launch)
    if config.sweep.only is not None and overrides is None:
        raise ConfigError(
            f"sweep.only={config.sweep.only}: chooses a job of a sweep, and this is none; add -m,"
            " or remove it"
        )
    name_run(config, choices, rules, overrides)
    return config


def publish(config: DictConfig, dist: Any) -> DictConfig:
    """Sends rank 0's configuration to every rank, as text."""
    return OmegaConf.create(dist.broadcast_text(OmegaConf.to_yaml(config)))


def check_keys(
    given: Plain, defaults: Plain, rules: Rules, above: str = "", root: Plain | None = None
) -> Plain:
    """Refuses unknown keys and wrong values; returns the values in their proper types.

    Interpolations are left as they are.
    """
    if root is None:
        check_plain("", root := given)
    right: Plain = {}
    if missing := [key for key in defaults if key not in given]:
        raise ConfigError(
            f"{above}{missing[0]}: every key is needed and this one was deleted; remove"
            f" ~{above}{missing[0]}"
        )
    for key, value in given.items():
        path = f"{above}{key}"
        rule = rules.get(path, Rule())
        if key not in defaults:
            raise ConfigError(f"{path}={short(value)}: {unknown(path)}")
        if isinstance(defaults[key], dict) and isinstance(value, dict):
            right[key] = check_keys(value, defaults[key], rules, f"{path}.", root)
        elif rule.follows:
            if not is_interpolation(value) and value != root[rule.follows]:
                raise ConfigError(
                    f"{path}={short(value)}: follows {rule.follows}; set {rule.follows} instead"
                )
            right[key] = value if is_interpolation(value) else f"${{{rule.follows}}}"
        else:
            right[key] = (
                value if is_interpolation(value) else check_value(path, value, defaults[key], rule)
            )
    return right


def fill_in(given: Plain) -> Plain:
    """Replaces every interpolation by its value."""
    try:
        filled: Any = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        key = str(getattr(error, "full_key", None) or "")
        value_given = dict(leaves(given)).get(key)
        raise ConfigError(f"{key}={short(value_given)}: {_reason(error)}") from None
    for path, value in leaves(filled):
        if is_interpolation(value):
            raise ConfigError(
                f"{path}={short(value)}: ${{ begins an interpolation and no value; remove it"
            )
    return filled


def name_run(
    config: DictConfig, choices: Mapping[str, str], rules: Rules, overrides: Sequence[str] | None
) -> None:
    """Names the run after its configuration, so that the same command finds its own run."""
    plain: Any = OmegaConf.to_container(config)
    key, data = next(
        (
            (path, value)
            for path, value in leaves(plain)
            if value and is_marked(path, rules, NAMES_PROJECT)
        ),
        ("", None),
    )
    if config.run_name is not None:
        check_name("run_name", config.run_name)
    if data and not config.project_name:
        config.project_name = folder_name(data)
        if config.project_name:
            check_name(key, config.project_name)
    config.project_name = config.project_name or choices["data"]
    if config.run_name is None:
        content = json.dumps(run_values(plain, rules, SAME_RUN), sort_keys=True)
        config.run_name = f"{choices['arch']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    elif overrides is not None:  # jobs of a sweep that share a name must not share a directory
        runs = Path("runs", config.project_name)
        config.run_name = job_name(config.run_name, config, choices, overrides, rules, runs)
    if config.eval_only:  # beside the run that it evaluates, and never in its place
        config.run_name += "-evaluation"
    check_name("project_name", config.project_name)
    config.checkpoint_path = (
        config.checkpoint_path or f"runs/{config.project_name}/{config.run_name}"
    )


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if match := re.search(r"Environment variable '(.*)' not found", text):
        return (
            f"the environment variable {match[1]} is not set; export it, or give the value itself"
        )
    if match := re.search(r"Interpolation key '(.*)' not found|Error resolving key '(.*)'", text):
        return f"there is no key {match[1] or match[2]}"
    if (
        isinstance(error, RecursionError)
        or "Recursive interpolation" in text
        or "parent node" in text
    ):
        return "leads back to itself; give a value"
    return (
        "cannot be read as an interpolation"
        f" ({text.removeprefix('GrammarParseError raised while resolving interpolation: ')})"
    )
