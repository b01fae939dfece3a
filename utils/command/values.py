"""Checks single values: type, bounds, finite numbers of 64 bits, text that can be printed."""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from utils.command.instantiate import check_special
from utils.errors import ConfigError, short

WORDS = list[str]
NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "a word", bool: "true or false",
    list: "a list like [a,b]", WORDS: "a list of words", dict: "a group of keys",
}  # fmt: skip
BOUNDS = {
    ">": ("more than", operator.gt),
    ">=": ("at least", operator.ge),
    "<": ("less than", operator.lt),
    "<=": ("at most", operator.le),
}
NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")
INT64 = 2**63


@dataclass(frozen=True)
class Rule:
    """All that conf/ says of a key besides its default."""

    # types, and values that are right as they stand; none: the default's type
    holds: tuple[Any, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    marks: frozenset[str] = frozenset()
    divides: str = ""  # the key beside it that must be a multiple of its value
    follows: str = ""  # the root key whose value it always has
    about: str = ""  # the description
    heading: str = ""  # the comment above the key, which stands for those after it too


def check_value(path: str, value: Any, default: Any, rule: Rule) -> Any:
    """Returns the value in its proper type; raises ConfigError if it does not fit."""
    holds = rule.holds or (type(default),)
    fitting = [new for kind in holds if _fits(new := _convert(value, kind), kind)]
    if not fitting:
        right = type_names(holds)
        example = (
            f", for example {short(default)}"
            if isinstance(default, int | float | str) and default not in ("", *holds)
            else ""
        )
        # variables of the environment are words, also where they look like numbers
        word = isinstance(value, str) and NUMBER.fullmatch(value) and {int, float} & {*holds}
        hint = "; this is a word, of which ${oc.decode:...} makes a number" if word else ""
        raise ConfigError(f"{path}={short(value)}: must be {right}{example}{hint}")
    value = fitting[0]
    if value == "":
        raise ConfigError(
            f"{path}=: is empty, as a variable that is not set would leave it; give a value, or"
            f" leave {path} out"
        )
    if isinstance(value, int):  # 1e30 has become one
        check_plain(path, value)
    for sign, bound in rule.bounds if isinstance(value, int | float) else ():
        name, holds_for = BOUNDS[sign]
        if not holds_for(value, bound):
            raise ConfigError(f"{path}={short(value)}: must be {name} {bound}")
    return value


def type_names(holds: Sequence[Any]) -> str:
    """Types and values in words: `a whole number, auto or null`."""
    *others, last = [NAMES.get(kind, short(kind)) for kind in holds]
    return f"{', '.join(others)} or {last}" if others else last


def check_plain(path: str, value: Any) -> None:
    """Refuses what no key may hold, at any depth."""
    for inner, leaf in leaves(value, path):
        if is_interpolation(leaf):
            continue
        check_special(inner, leaf)
        if leaf == "???":
            raise ConfigError(f"{inner}=???: stands for a value that is missing; give one")
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise ConfigError(f"{inner}={leaf}: must be a number, and a finite one")
        if isinstance(leaf, int) and abs(leaf) >= INT64:
            raise ConfigError(
                f"{inner}={short(leaf)}: whole numbers must be less than {INT64}; text stands in"
                " quotes within quotes"
            )
        if isinstance(leaf, str) and any(
            unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in leaf
        ):
            raise ConfigError(
                f"{inner}={short(leaf)}: holds a character that cannot be printed; remove it"
            )


def leaves(value: Any, path: str = "", into_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields every value that contains no others, with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key), into_lists)
    elif isinstance(value, list) and value and into_lists:
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def is_interpolation(value: Any) -> bool:
    """Returns whether a value is an interpolation."""
    return isinstance(value, str) and "${" in value


def _convert(value: Any, kind: Any) -> Any:
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return kind(value) if kind in (float, str) and type(value) in (int, float) else value


def _fits(value: Any, kind: Any) -> bool:
    if kind == WORDS:
        return type(value) is list and all(isinstance(word, str) and word for word in value)
    if isinstance(kind, type):
        # of a default that is null, and no more said of it, all is right
        return type(value) is kind or kind is type(None)
    return type(value) is type(kind) and value == kind
