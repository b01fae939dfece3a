"""Reads files that may be damaged: arrays from `.npy`, and descriptions from JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from utils.errors import short
from utils.files import open_plain, read_bytes

T = TypeVar("T")
LARGEST_JSON = 1 << 30


def open_array(path: Path, dimensions: int) -> np.ndarray:
    """Maps a file's array of whole numbers. Raises ValueError if it holds something else, OSError
    if it cannot be read.
    """
    open_plain(path).close()
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except EOFError as error:
        raise ValueError(str(error)) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise ValueError("holds no whole numbers")
    if array.ndim != dimensions:
        raise ValueError(f"has shape {array.shape}")
    # `take` would copy the whole of an array of another layout, every time; and plain views are
    # quicker to slice than the subclass
    return np.require(array.view(np.ndarray), requirements=["C", "A"])


def read_json(path: Path, kind: TypeAdapter[T]) -> T:
    """Reads a JSON file of a kind. Raises ValueError for the first value that is wrong, OSError if
    it cannot be read.
    """
    return parse_json(read_bytes(path, LARGEST_JSON), kind, strict=True)


def parse_json(content: bytes, kind: TypeAdapter[T], strict: bool = False) -> T:
    """Reads JSON of a kind. Raises ValueError for the first value that is wrong."""
    try:
        return kind.validate_json(content, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f"={short(first['input'])}"
        raise ValueError(f"{place}{value}: {first['msg']}" if place else first["msg"]) from None
