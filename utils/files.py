"""Writes files that a crash leaves whole, and reads files that anybody may have written.

Only plain files are opened: a pipe or a device would hang a run. What JSON and YAML say is bounded
in size and depth, and checked by pydantic, so that a stranger's file is read or is a line of error.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import yaml
from pydantic import TypeAdapter, ValidationError

from utils.errors import ConfigError, brief, short

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent  # of this repository
TEXT_LIMIT = 1 << 24  # bytes; what a run writes is far shorter
JSON_LIMIT = 1 << 30  # bytes; names of puzzles take as much
DEEPEST = 50  # lists and mappings within each other; JSON's parser has a limit, too
OBJECT = TypeAdapter(dict[str, Any])
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast


def open_plain(path: Path) -> io.FileIO:
    """Opens a plain file for reading, without a buffer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(path, "rb", buffering=0)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Reads a whole file if it is no longer than `limit`."""
    with open_plain(path) as stream:
        if limit is not None and os.fstat(stream.fileno()).st_size > limit:
            raise ValueError(f"more than {limit:,} bytes")
        return stream.readall()


def read_text(path: Path) -> str:
    """Reads a text file; raises ValueError if it is none."""
    return read_bytes(path, TEXT_LIMIT).decode()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file at once: readers, crashes and a second writer leave one whole content."""
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    aside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        with open(aside, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename, or a crash could leave an empty file
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def safe_name(text: str) -> str:
    """Turns any text into a file name: never a path, and different for different texts."""
    quoted = quote(text, safe="", errors="surrogateescape")
    # none at all, the folder itself, the one above
    return quoted if quoted.strip(".") else f"%{quoted}"


def parse_json(text: bytes | str, kind: TypeAdapter[T]) -> T:
    """Parses JSON of a kind. Raises ValueError for the first value that is wrong."""
    if isinstance(text, bytes):
        text = text.removeprefix(codecs.BOM_UTF8)
    with first_problem():
        return kind.validate_json(text, strict=True)


@contextlib.contextmanager
def first_problem() -> Iterator[None]:
    """Raises a ValueError of one line for the first value that pydantic finds wrong."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f"={short(first['input'])}"
        raise ValueError(f"{place}{value}: {first['msg']}" if place else first["msg"]) from None


def read_json(
    path: Path, kind: TypeAdapter[T], remedy: str = "", where: str = "", limit: int = JSON_LIMIT
) -> T:
    """Reads a JSON file of a kind. Raises ConfigError with the file (or `where`), what is wrong
    with it, and the remedy.
    """
    try:
        return parse_json(read_bytes(path, limit), kind)
    except (OSError, ValueError) as error:
        raise ConfigError(brief(error), value=where or path, remedy=remedy) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file; raises ConfigError. Aliases are refused: with them, a few
    lines can stand for gigabytes, or for what holds itself.
    """
    try:
        text, depth = read_text(path), 0
        for event in yaml.parse(text, LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("has an alias; write it out")
            if depth > DEEPEST:
                raise ValueError("is nested too deeply")
        with first_problem():
            return OBJECT.validate_python(yaml.load(text, LOADER))
    except Exception as error:  # PyYAML raises what its conversions raise
        raise ConfigError(brief(error), value=path) from None


def read_row(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; empty if there is none."""
    try:
        return read_json(path, OBJECT)
    except ConfigError:
        return {}
