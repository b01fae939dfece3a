"""Prepares the command line for Hydra, and refuses what Hydra would misread."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.command.from_checkpoint import as_override, overrides_in_checkpoint, plain_key
from utils.command.keys import GROUPS, LITERAL, all_rules, check_choice, is_marked
from utils.errors import ConfigError, short

CHOSEN = (*GROUPS, "experiment")
PLAIN = re.compile(r"[\w./-]*")  # as Hydra reads it: a number, null, a word
QUOTED = re.compile(r"""(["'])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
ESCAPES = (("${", r"\x24{"), ("\n", r"\n"), ("\t", r"\t"), ("\r", r"\r"))
NOTHING = ("null", "", "''", '""')
OPTIONS = (
    "--",
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--config-dir",
    "--info",
)
SWEEPS, SWEEP_DIR = {"-m", "--multirun"}, "runs/multirun"  # the folder as conf/pretrain.yaml has it
# a key in quotes within a mapping, as in {'.*mlp.*': 64}
QUOTED_KEY = re.compile(r"""([{,]\s*)(['"])([^'"]+)\2(\s*:)""")
WITH_VALUE = (
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--package",
    "-p",
    "--cfg",
    "-c",
    "--info",
    "-i",
)


def prepare(
    arguments: Sequence[str],
    rank: int = 0,
    scratch: str = "",
    config_in: Callable[[str], Mapping[Any, Any]] | None = None,
) -> list[str]:
    """Returns the arguments that Hydra gets.

    `+key=` may also name a key that exists, and options may stand anywhere. Only rank 0 writes the
    files of a sweep; other ranks write theirs to `scratch`. An evaluation adopts the configuration
    that `config_in` reads from its checkpoint.
    """
    options: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        check_argument(argument)
        if argument == "--":
            continue
        if argument.startswith("-") or before in WITH_VALUE:
            options.append(argument)
        elif override := _prepare(argument):
            overrides.append(override)
    if not sweeps([*options, *overrides]):
        overrides = [literal(override) for override in overrides]
    if config_in and not sweeps([*options, *overrides]):
        overrides = [*overrides_in_checkpoint(overrides, config_in), *overrides]
    if rank > 0:
        given = any(override.startswith("hydra.sweep.dir=") for override in overrides)
        _check_sweep_folder(
            overrides if given or not SWEEPS & {*options} else [f"hydra.sweep.dir={SWEEP_DIR}"]
        )
        overrides.append(f"hydra.sweep.dir={scratch}")
    return [*options, "--", *overrides] if options else overrides


def sweeps(arguments: Sequence[str]) -> bool:
    """Returns whether the arguments ask for several jobs."""
    return bool(SWEEPS & {*arguments}) or any(
        argument.startswith("hydra.mode=") for argument in arguments
    )


def check_argument(argument: str) -> None:
    """Refuses an argument that Hydra would misread, or that would run foreign code."""
    if not argument.strip():
        raise ConfigError(
            "'': an empty argument, as a variable that is not set leaves it; remove it"
        )
    if re.fullmatch(r"[+~@=]+|[+~@]*=.*", argument):
        raise ConfigError(f"{short(argument)}: names no key; write key=value")
    if re.match(r"[+~]*hydra\b", argument) and ("_target_" in argument or "callbacks" in argument):
        raise ConfigError(
            f"{short(argument)}: Hydra would run that; choose what is there by hydra/launcher= and"
            " hydra/sweeper="
        )
    # In full: Hydra takes the beginning of an option for all of it, and one of its options reads a
    # pickle, which can run any code.
    if argument.startswith("--") and argument.partition("=")[0] not in OPTIONS:
        raise ConfigError(
            f"{short(argument)}: no option of ours; --help tells what there is, and"
            " --experimental-rerun would read a pickle"
        )
    if digits := re.search(r"\d{1000,}", argument.replace("_", "")):
        raise ConfigError(
            f"{short(argument)}: a number of {len(digits[0])} digits; no key takes one"
        )


def refuse_usage() -> None:
    """Makes argparse raise a ConfigError of one line instead of printing its usage."""

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help tells what there is")

    argparse.ArgumentParser.error = refuse  # type: ignore[assignment, method-assign]


def _prepare(argument: str) -> str:
    """One override as Hydra needs it; empty if it changes nothing."""
    key, _, choice = argument.lstrip("+").partition("=")
    if key == "experiment" and choice in NOTHING and "=" in argument:
        return ""
    if key in CHOSEN and "=" in argument:
        of_many = next((part for part in choice.split(",") if part in NOTHING), None)
        if (
            of_many is not None
            or choice.startswith(("{", "$"))
            or (choice.startswith("[") and key != "experiment")
        ):
            check_choice(key, choice if of_many is None else of_many)
        return argument.lstrip("+")
    if choice.startswith("{"):
        argument = QUOTED_KEY.sub(lambda match: match[1] + plain_key(match[3]) + match[4], argument)
    return (
        f"+{argument}" if argument.startswith("+") and not argument.startswith("++") else argument
    )


def literal(override: str) -> str:
    """Returns an override whose text Hydra leaves as it is, if its key takes texts.

    Hydra removes quotes around all of it, as elsewhere. The run itself reads escapes; what a
    configuration cannot hold becomes one, and `${`, which would begin an interpolation.
    """
    key, _, text = override.partition("=")
    if PLAIN.fullmatch(text) or not is_marked(key.lstrip("+"), all_rules(), LITERAL):
        return override
    for plain, escape in ESCAPES:
        text = text.replace(plain, escape)
    return f"{key}={text if QUOTED.fullmatch(text) else as_override(text)}"


def _check_sweep_folder(overrides: Sequence[str]) -> None:
    """Makes the sweep's folder on all ranks: if rank 0 alone failed, the others would wait."""
    for override in overrides:
        key, _, path = override.partition("=")
        if key == "hydra.sweep.dir" and "$" not in path:
            try:
                Path(path).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{override}: cannot be used ({error.strerror}); give a place that you may"
                    " write to"
                ) from None
