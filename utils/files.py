"""Writes files that a crash leaves whole, and reads files that anybody may have written.

Only plain files are opened: a pipe or a device would hang a run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent  # of this repository
TEXT_LIMIT = 1 << 24  # bytes; what a run writes is far shorter


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


def read_row(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; empty if there is none."""
    try:
        row = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
