"""Scenes, the figures of the report page: small JSON files by which an evaluation shows the model
at work.

A scene is an object with a `kind`, which names the function that draws it, a `title`, perhaps a
`caption`, and data. docs/report.md describes every kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Files = dict[str, str | bytes]  # as in `Report.files`
SUFFIX = ".scene.json"
MOST = 60_000  # characters of one scene
LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def scene(name: str, kind: str, title: str, caption: str = "", **data: Any) -> Files:
    """Returns the scene's file by its name, to be merged into `Report.files`."""
    head = {"kind": kind, "title": title} | ({"caption": caption} if caption else {})
    content = json.dumps(plain(head | data, digits=5), separators=(",", ":"), allow_nan=False)
    return {name + SUFFIX: content + "\n"}


def fitting(items: Sequence[T], make: Callable[[Sequence[T]], Files]) -> Files:
    """Returns the scene of as many items, counted from the first, as its size allows."""
    for count in range(len(items), 0, -1):
        made = make(items[:count])
        if all(len(content) <= MOST for content in made.values()):
            return made
    return {}


def spread(last: int, most: int) -> list[int]:
    """Returns 1 to `last`, or `most` of these numbers, evenly spaced, with both ends."""
    count = min(last, most)
    if count == 1:
        return [last]
    return [1 + index * (last - 1) // (count - 1) for index in range(count)]


def levels(values: Sequence[float]) -> str:
    """Encodes numbers between 0 and 1 as one character each, in 64 levels."""
    top = len(LEVELS) - 1
    return "".join(LEVELS[round(min(1.0, max(0.0, value)) * top)] for value in values)


def plain(value: Any, digits: int = 17) -> Any:
    """Returns the value with what JSON has: NaN and infinities become null, other types text.

    Floats are rounded to so many digits; 17 keep every bit.
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
