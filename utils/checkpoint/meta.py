"""`meta.json` of a checkpoint: all that a run resumes with besides tensors, checked when read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.checkpoint.stepfolders import STEP_FOLDER
from utils.errors import brief, short
from utils.files import read_text

# of a configuration; ours have some thousand characters and five levels
LONGEST, DEEPEST = 1 << 18, 50
MOST, MOST_SHARDS = 1 << 53, 1 << 20


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _frozen(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(part, dict) and _text(part.get("path")) and _text(part.get("sha256"))
        for part in value.values()
    )


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and name and not {".", "/", "\0"} & set(name) for name in value
    )


Check = tuple[Callable[[Any], bool], str]
A_COUNT: Check = (_count, "a whole number, not negative")
A_TEXT: Check = (_text, "a text")
CHECKS: dict[str, Check] = {
    "step": A_COUNT,
    "threads": A_COUNT,
    "groups": (_names, "a list of the groups of tensors"),
    "config": A_TEXT,
    "fingerprint": A_TEXT,
    "best_of": A_TEXT,
    "resumed_from": A_TEXT,
    "code": A_TEXT,
    "torch": A_TEXT,
    "evaluation_due": (lambda value: isinstance(value, bool), "true or false"),
    "results": (
        lambda value: isinstance(value, dict) and all(map(_number, value.values())),
        "numbers by name",
    ),
    "best": (
        lambda value: value is None or (_number(value) and not math.isnan(value)),
        "a number or null",
    ),
    "wandb_id": (lambda value: value is None or _text(value), "a text or null"),
    "lr": (lambda value: _number(value) and math.isfinite(value), "a number"),
    "frozen": (_frozen, "path and sha256 by name"),
    "ranks": A_COUNT,
}
LATER = ("lr", "frozen", "ranks")  # older checkpoints do without


def read(folder: Path) -> dict[str, Any]:
    """Reads meta.json; a ValueError says what is wrong, an OSError that it cannot be read."""
    try:
        meta = json.loads(read_text(folder / "meta.json"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(meta, dict) or "groups" not in meta:
        raise ValueError("names no groups of tensors")
    for key, (fits, wanted) in CHECKS.items():
        if key in meta and not fits(meta[key]):
            raise ValueError(f"{key}={brief(meta[key])} must be {wanted}")
    return meta


def check_run(meta: Mapping[str, Any], folder: Path) -> int:
    """Returns the run's number of shards; raises ValueError unless the meta has all that a run
    writes.
    """
    for key in CHECKS:
        if key not in meta and key not in LATER:
            raise ValueError(f"has no {key}")
    named = STEP_FOLDER.fullmatch(folder.name.removeprefix(".").removesuffix(".replaced"))
    if named and int(named[1]) != meta["step"]:
        raise ValueError(f"step={meta['step']} in a folder of that name")
    shards = config_of(meta["config"]).get("shards")
    if not isinstance(shards, int) or isinstance(shards, bool) or not 1 <= shards <= MOST_SHARDS:
        raise ValueError(
            f"config: shards={brief(shards)} must be a whole number from 1 to {MOST_SHARDS:,}"
        )
    return shards


def config_of(text: str) -> dict[Any, Any]:
    """Parses a configuration that anybody may have written; a ValueError says what is wrong."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if len(text) > LONGEST:
        raise ValueError(f"config: more than {LONGEST:,} characters")
    try:
        _check_events(text)
        config = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"config: cannot be read ({' '.join(str(error).split())[:120]})") from None
    assert isinstance(config, dict)
    return config


def _check_events(text: str) -> None:
    """Checks the outline before anything is built: a few aliases can stand for gigabytes."""
    import yaml

    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases, which no run writes")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise yaml.YAMLError(
                f"{short(event.value)} is an interpolation, and a run writes values in their place"
            )
        if number == 2 and not isinstance(event, yaml.MappingStartEvent):
            raise yaml.YAMLError("it is no list of keys and values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")
    if number < 3:  # beginning and end of nothing
        raise yaml.YAMLError("it is empty")
