"""Prepares the command line for Hydra, and refuses what would run foreign code."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from utils.command.keys import GROUPS
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

GROUP_KEYS = (*GROUPS, "experiment")
# any of these says what an evaluated run is
DEFINE_A_RUN = {"experiment", "arch", "data", "optim"}
SWEEPS = ("-m", "--multirun")
WITH_VALUE = (
    *("-cp", "-cn", "-cd", "-p", "-c", "-i", "--experimental-rerun"),
    *("--config-path", "--config-name", "--config-dir", "--package", "--cfg", "--info"),
)
FLAGS = ("-r", "--run", "--resolve", "--version", "--hydra-help", "-sc", "--shell-completion")
OPTIONS = (*SWEEPS, *WITH_VALUE, *FLAGS)  # of Hydra, but for --help

# a key in quotes within a mapping, as in {'.*mlp.*': 64}, which Hydra's grammar does not take
QUOTED_KEY = re.compile(r"""([{,]\s*)['"]([^'"]+)['"]\s*:""")
SPECIAL = re.compile(r"[()\[\]{}:=, ]|\\(?=[()\[\]{}:=, \\]|$)")


def prepare(arguments: Sequence[str], launch: Launch = Launch()) -> list[str]:  # noqa: B008
    """Returns what Hydra gets: options first, and `+key=` also for keys that exist."""
    options: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        # torch.distributed.launch adds this one, whose number is in the environment too
        if argument == "--" or argument.startswith("--local-rank="):
            continue
        if before in WITH_VALUE or argument.partition("=")[0] in OPTIONS:
            options.append(argument)
        else:
            overrides.append(_prepare(argument))
    keys = {*map(key_of, overrides)}
    if {"eval_only", "checkpoint"} <= keys and not DEFINE_A_RUN & keys:
        # it has the keys of its checkpoint, which Hydra does not know
        overrides = [_added(override) for override in overrides]
    if launch.world_size > 1 and any(sweep in options for sweep in SWEEPS):
        raise ConfigError(
            f"-m: {launch.world_size} ranks cannot start a sweep together; start it as one process"
            f" with sweep.ranks={launch.world_size}"
        )
    return [*options, "--", *overrides] if options else overrides


def key_of(override: str) -> str:
    """Returns the key that an override sets, adds or removes."""
    return override.lstrip("+~").partition("=")[0]


def _added(override: str) -> str:
    plain = re.match(r"[a-z]\w*(\.\w+)*=", override)
    return f"++{override}" if plain and not override.startswith(("hydra", "sync=")) else override


def _prepare(argument: str) -> str:
    """One override as Hydra needs it."""
    if plain := argument.startswith("-") and argument.lstrip("-"):
        write = plain if "=" in plain else f"{plain}=VALUE"
        raise ConfigError(f"{argument}: keys are given without dashes; write {write}")
    if "=" not in argument and not argument.startswith("~"):
        raise ConfigError(
            f"{argument}: must be key=value, without spaces; a recipe is experiment=NAME"
        )
    key = key_of(argument)
    if key in GROUP_KEYS:
        choice = argument.partition("=")[2]
        if key != "experiment" and choice and not isinstance(yaml.safe_load(choice), str):
            raise ConfigError(f"{argument}: is not a name; --help {key} lists the choices")
        return argument.lstrip("+")
    argument = QUOTED_KEY.sub(
        lambda match: match[1] + SPECIAL.sub(r"\\\g<0>", match[2]) + ":", argument
    )
    return f"+{argument}" if re.match(r"\+[^+]", argument) else argument
