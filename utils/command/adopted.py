"""The configuration of a run whose checkpoint is evaluated, as arguments before those that the user has given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.command.keys import GROUPS, choice_like, kept_by_machine, known, run_values
from utils.command.values import leaves

CHOICES = {"experiment", "arch", "data", "optim"}  # whoever makes one of these says by it what the run is
OF_THE_RUN = ("run_name", "project_name")  # an evaluation lies beside it


def adopted(overrides: Sequence[str], config_in: Callable[[str], Mapping[Any, Any]]) -> list[str]:
    """Nothing unless it is an evaluation that does not say of what, and the checkpoint does."""
    given = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    checkpoint = given.get("checkpoint", "")
    if given.get("eval_only", "").lower() != "true" or not checkpoint or "$" in checkpoint or CHOICES & given.keys():
        return []
    config = config_in(checkpoint.strip("'\""))
    choices = {group: name for group in GROUPS if (name := choice_like(group, config))}
    if choices.keys() != {*GROUPS}:
        return []  # of a net or data that conf/ does not have
    defaults, rules = known(choices)
    machine, follow = kept_by_machine() - {*OF_THE_RUN}, dict(leaves(config, into_lists=False)).keys() - run_values(config, rules).keys()
    found = []
    for path, default in leaves(defaults, into_lists=False):
        value = _at(path, config, default)
        if value != default and path not in follow and path.partition(".")[0] not in machine:
            found.append(f"{path}={written(value)}")
    return [*(f"{group}={name}" for group, name in choices.items() if group not in machine), *found]


def _at(path: str, config: Mapping[Any, Any], otherwise: Any) -> Any:
    """What stands there, which may be a group of keys; the code may know keys that an older run has not."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return otherwise
        found = found[key]
    return found


def written(value: Any) -> str:
    """As Hydra's grammar has it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.single).with_quotes()
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
