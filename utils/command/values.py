"""What a key may hold: its default's type, finite numbers of 64 bits, text that can be printed, and plain values only."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig

from utils.command.instantiate import check_special, is_special
from utils.errors import ConfigError

# The types of keys whose default is null (they stay optional), and of the ones that may be made null.
OPTIONAL: dict[str, type] = {
    "data_path": str, "data_paths": list, "data_paths_test": list, "checkpoint": str, "checkpoint_path": str,
    "project_name": str, "run_name": str, "objective_metric": str, "max_steps": int, "epochs": int, "eval_interval": int,
    "micro_batch_size": int, "eval_batch_size": int, "grad_clip": float, "init_from": str,
    "checkpoint_interval": int, "checkpoint_minutes": float, "keep": int,
}  # fmt: skip
CHOICES: dict[str, tuple] = {
    "compile": ("auto", True, False),
    "on_nonfinite": ("raise", "skip"),
    "wandb.mode": ("auto", "online", "offline", "disabled"),
}
# Keys that hold words, and may hold them in a list
LISTS = {"data_paths": "folders", "data_paths_test": "folders", "eval_save_outputs": "names"}
NAMES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", list: "a list like [a,b]", dict: "a group of keys"}
NUMERIC = (int, float, bool)
INT64 = 2**63
TOO_LARGE = f"whole numbers must be less than {INT64}"


def checked(path: str, value: Any, default: Any, node: Any) -> Any:
    """The value in its proper type; `node` is the default as conf/ has it, `default` what it resolves to."""
    check_plain(path, value)
    if path in CHOICES:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in CHOICES[path]):
            raise ConfigError(f"{path}={short(value)}: choose one of {', '.join(str(c).lower() for c in CHOICES[path])}")
        return value
    wanted = OPTIONAL.get(path) or (list if isinstance(node, ListConfig) else dict if isinstance(node, DictConfig) else type(default))
    if (value is None and (path in OPTIONAL or default is None)) or wanted is type(None):
        return value
    if path == "resume" and isinstance(value, bool):
        return "auto" if value else False
    if path == "micro_batch_size" and value == "auto":
        return value
    value = _converted(value, wanted)
    if not isinstance(value, wanted) or (wanted in (int, float) and isinstance(value, bool)):
        example = f", for example {short(default)}" if default not in (None, "") and wanted is not list else ""
        raise ConfigError(f"{path}={short(value)}: must be {NAMES[wanted]}{example}{_hint(value, wanted)}")
    if isinstance(value, int) and abs(value) >= INT64:  # written as 1e30
        raise ConfigError(f"{path}={short(value)}: {TOO_LARGE}")
    if value == "":
        raise ConfigError(f"{path}=: is empty, as a variable that is not set would leave it; give a value, or leave {path} out")
    if isinstance(value, list) and path in LISTS and not all(isinstance(word, str) and word for word in value):
        raise ConfigError(f"{path}={short(value)}: must be a list of {LISTS[path]}")
    return value


def check_plain(path: str, value: Any) -> None:
    """What no key may hold, at any depth."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            place = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
            if is_special(key):
                check_special(place, inner)
            check_plain(place, inner)
    elif value == "???":
        raise ConfigError(f"{path}=???: stands for a value that is missing; give one")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}={value}: must be a number, and a finite one")
    elif isinstance(value, int) and abs(value) >= INT64:
        raise ConfigError(f"{path}={short(value)}: {TOO_LARGE}")
    elif isinstance(value, str) and unprintable(value):
        raise ConfigError(f"{path}={short(value)}: holds a character that cannot be printed; remove it")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def is_interpolation(value: Any) -> bool:
    """Whether a value still stands for another."""
    return isinstance(value, str) and "${" in value


def short(value: Any) -> str:
    """A value as an error shows it: on one line, and not all of it."""
    if isinstance(value, int) and abs(value) >= INT64**4:
        value = hex(value)  # there is no limit to what can be written so
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = visible(text)
    return text if len(text) <= 60 else text[:57] + "..."


def unprintable(text: str) -> bool:
    """Whether text would not be shown as it is: control characters and ends of lines."""
    return any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text)


def visible(text: str) -> str:
    """The same on one line, with nothing in it that a terminal obeys."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def nearest(key: str, known: Iterable[str]) -> str:
    """What a misspelt key was meant to be, as the end of an error."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; conf/pretrain.yaml lists all keys"


def _converted(value: Any, wanted: type) -> Any:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if wanted is float and numeric:
        return float(value)
    return str(value) if wanted is str and numeric else value


def _hint(value: Any, wanted: type) -> str:
    """Variables of the environment are words, also where they look like numbers."""
    if not isinstance(value, str) or wanted not in NUMERIC:
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return "; this is a word, of which ${oc.decode:...} makes a number"
