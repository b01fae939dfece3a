"""Checks the values of a configuration, and makes what its `_target_`s name: only things of this
repository, and with errors of one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from utils.command.keys import OfSignature, find, keys_of, parts_of, unknown
from utils.command.marks import Keys
from utils.command.root import Plain, Root
from utils.errors import ConfigError, brief, short

AnyKeys = TypeVar("AnyKeys", bound=Keys)
# Errors of missing memory: of the CPU's allocator, of sizes beyond 64 bits, and of a GPU
NO_MEMORY = re.compile(r"allocat\w* memory|out of memory|overflow", re.IGNORECASE)


def check(config: Plain) -> Root:
    """Returns the configuration with every value in its proper type; raises ConfigError."""
    checked = _typed("", config, Root)
    values: Plain = {}
    for path, part in parts_of(checked.plain()).items():
        keys = _keys(part, path).model_dump(exclude_unset=True)
        values |= {f"{path}.{key}": value for key, value in keys.items()}
    return checked.with_values(values)


def make(part: Any, path: str, *args: Any) -> Any:
    """Makes what the `_target_` of a part names, from these arguments and its keys; `path` is its
    place in the configuration.
    """
    target, keys = find(part, path), _keys(part, path)
    named = dict(keys) if isinstance(keys, OfSignature) else {"keys": keys}
    try:
        return target(*args, **named)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: {_call(part)}: {brief(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        raise ConfigError(
            f"{path}: {_call(part)} needs memory that this machine does not have; make it smaller"
        ) from None


def _call(part: Plain) -> str:
    keys = (f"{key}={value}" for key, value in part.items() if key != "_target_")
    return f"{part['_target_']}({', '.join(keys)})"


def _keys(part: Any, path: str) -> Keys:
    """Returns the keys of a part, checked."""
    keys = keys_of(part, path)
    return _typed(path, {key: value for key, value in part.items() if key != "_target_"}, keys)


def _typed(path: str, values: Plain, keys: type[AnyKeys]) -> AnyKeys:
    try:
        return keys.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_line(path, values, error)) from None


def _line(path: str, values: Plain, error: ValidationError) -> str:
    """One line for the first key that is wrong: the key, the value, and what would be right."""
    found = [
        (*_place_of(path, values, problem["loc"], problem["type"] == "missing"), problem)
        for problem in error.errors(include_url=False)
    ]
    first, value, _ = found[0]
    # a union has a problem for each of its members
    texts = dict.fromkeys(_text(key, problem) for key, _, problem in found if key == first)
    return f"{first}={short(value)}: {' or '.join(texts).replace(' or must be ', ' or ')}"


def _text(key: str, problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        return unknown(key)
    if problem["type"] == "missing":
        return "is missing; every key needs a value in the yaml file"
    return problem["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")


def _place_of(
    path: str, values: Any, location: tuple[int | str, ...], is_missing: bool
) -> tuple[str, Any]:
    """The key that an error is about, without the names of a union's members, and its value."""
    for step in location:
        if isinstance(values, Mapping) and step in values:
            path, values = f"{path}.{step}" if path else str(step), values[step]
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            path, values = f"{path}[{step}]", values[step]
    if is_missing:
        return f"{path}.{location[-1]}" if path else str(location[-1]), None
    return path, values
