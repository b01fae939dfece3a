"""The configuration of a run whose checkpoint is evaluated, as arguments before those that the user has given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.command.keys import GROUPS, choice_like, kept_by_machine, known, run_values
from utils.command.values import leaves
from utils.errors import ConfigError, short

CHOICES = {"experiment", "arch", "data", "optim"}  # whoever makes one of these says by it what the run is
STANDARD = "allreduce"  # where a run has a way to synchronise that is not known here; nothing of it is taken over
OF_THE_RUN = {"run_name", "project_name", "eval_batch_size"}  # an evaluation lies beside it, and repeats its last one
KEY = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)  # what Hydra's grammar takes for the word that it is
WORDS = {"true", "false", "null", "nan", "inf"}


def adopted(overrides: Sequence[str], config_in: Callable[[str], Mapping[Any, Any]]) -> list[str]:
    """Nothing unless it is an evaluation that does not say of what, and the checkpoint does."""
    given = {key.lstrip("+"): override.lstrip("+") for override in overrides for key in [override.partition("=")[0]]}
    if not {"eval_only", "checkpoint"} <= given.keys() or CHOICES & given.keys() or _value(given["eval_only"]) is not True:
        return []
    checkpoint = _value(given["checkpoint"])
    config = config_in(checkpoint) if isinstance(checkpoint, str) and checkpoint and "$" not in checkpoint else {}
    if not config:
        return []
    machine = kept_by_machine() - OF_THE_RUN
    choices = {group: choice_like(group, config) for group in GROUPS}
    if lacking := [group for group in GROUPS if not choices[group] and group not in machine]:
        raise ConfigError(f"checkpoint={checkpoint}: {lacking[0]} of its run is none that conf/ offers; give arch and data, and their keys")
    defaults, rules = known({group: choice or STANDARD for group, choice in choices.items()})
    follow = dict(leaves(config, into_lists=False)).keys() - run_values(config, rules).keys()
    found = []
    for path, default in leaves(defaults, into_lists=False):
        value = _at(path, config, default)
        if value != default and path not in follow and path.partition(".")[0] not in machine:
            found.append(f"{path}={written(value, f'checkpoint={checkpoint}: {path}')}")
    return [*(f"{group}={name}" for group, name in choices.items() if group not in machine), *found]


def _value(override: str) -> Any:
    """What Hydra reads there; None where it will complain."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create().parse_override(override).value()
    except OverrideParseException:
        return None


def _at(path: str, config: Mapping[Any, Any], otherwise: Any) -> Any:
    """What stands there, which may be a group of keys; the code may know keys that an older run has not."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return otherwise
        found = found[key]
    return found


def written(value: Any, where: str = "") -> str:
    """As Hydra's grammar has it."""
    if isinstance(value, Mapping):
        if odd := [key for key in value if not (isinstance(key, str) and KEY.fullmatch(key) and key.lower() not in WORDS)]:
            raise ConfigError(f"{where} has the key {short(odd[0])}, which no argument can hold; give arch and data, and their keys")
        return "{" + ",".join(f"{key}:{written(inner, where)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(inner, where) for inner in value) + "]"
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.single).with_quotes()
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
