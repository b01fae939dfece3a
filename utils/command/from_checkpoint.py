"""Takes an evaluated run's configuration from its checkpoint, as arguments before the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.command.keys import GROUPS, choice_like, defaults_and_rules, kept_by_machine, run_values
from utils.command.values import leaves
from utils.errors import ConfigError, short

# whoever makes one of these says by it what the run is
CHOICES = {"experiment", "arch", "data", "optim"}
# where a run has a way to synchronise that is not known here; nothing of it is taken over
STANDARD = "allreduce"
# an evaluation lies beside it, and repeats its last one
OF_THE_RUN = {"run_name", "project_name", "eval_batch_size"}


def overrides_in_checkpoint(
    overrides: Sequence[str], config_in: Callable[[str], Mapping[Any, Any]]
) -> list[str]:
    """Returns the run's arguments if an evaluation names a checkpoint and no arch, data or
    experiment.
    """
    given = {
        key.lstrip("+"): override.lstrip("+")
        for override in overrides
        for key in [override.partition("=")[0]]
    }
    if (
        not {"eval_only", "checkpoint"} <= given.keys()
        or CHOICES & given.keys()
        or _value(given["eval_only"]) is not True
    ):
        return []
    checkpoint = _value(given["checkpoint"])
    config = (
        config_in(checkpoint)
        if isinstance(checkpoint, str) and checkpoint and "$" not in checkpoint
        else {}
    )
    if not config:
        return []
    machine = kept_by_machine() - OF_THE_RUN
    choices = {group: choice_like(group, config) for group in GROUPS}
    if lacking := [group for group in GROUPS if not choices[group] and group not in machine]:
        raise ConfigError(
            f"checkpoint={checkpoint}: {lacking[0]} of its run is none that conf/ offers; give arch"
            " and data, and their keys"
        )
    defaults, rules = defaults_and_rules(
        {group: choice or STANDARD for group, choice in choices.items()}
    )
    follow = dict(leaves(config, into_lists=False)).keys() - run_values(config, rules).keys()
    own = []
    for path, default in leaves(defaults, into_lists=False):
        value = _at(path, config, default)
        if value != default and path not in follow and path.partition(".")[0] not in machine:
            own.append(f"{path}={as_override(value, f'checkpoint={checkpoint}: {path}')}")
    return [*(f"{group}={name}" for group, name in choices.items() if group not in machine), *own]


def _value(override: str) -> Any:
    """The value as Hydra parses it; None where Hydra will refuse it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None


def _at(path: str, config: Mapping[Any, Any], otherwise: Any) -> Any:
    """The value at a path, or `otherwise`: an older run lacks keys that were added since."""
    inner: Any = config
    for key in path.split("."):
        if not isinstance(inner, Mapping) or key not in inner:
            return otherwise
        inner = inner[key]
    return inner


def as_override(value: Any, where: str = "") -> str:
    """Writes a value in Hydra's override grammar."""
    if isinstance(value, Mapping):
        if odd := [key for key in value if not _is_written(key)]:
            raise ConfigError(
                f"{where} has the key {short(odd[0])}, which no argument can hold; give arch and"
                " data, and their keys"
            )
        inside = [f"{plain_key(key)}:{as_override(inner, where)}" for key, inner in value.items()]
        return "{" + ",".join(inside) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_override(inner, where) for inner in value) + "]"
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.single).with_quotes()
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def plain_key(key: str) -> str:
    """Writes the key of a mapping without quotes, which Hydra's grammar does not take there."""
    return re.sub(r"[()\[\]{}:=, ]|\\(?=[()\[\]{}:=, \\]|$)", r"\\\g<0>", key)


def _is_written(key: Any) -> bool:
    """Whether a key is read as it stands from an argument."""
    return isinstance(key, str) and _value(f"k={{{plain_key(key)}:0}}") == {key: 0}
