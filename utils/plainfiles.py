"""Files that anybody may have left where a run looks: only plain ones are opened, because a pipe or a device would hang it."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

LIMIT = 1 << 24  # bytes of text; what a run writes is far shorter


def open_plain(path: Path) -> io.FileIO:
    """The file, to be read without a buffer."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        raise OSError(*((errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "not a plain file")), str(path))
    return open(path, "rb", buffering=0)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """All of a file, if it is no longer than this."""
    with open_plain(path) as stream:
        if limit is not None and os.fstat(stream.fileno()).st_size > limit:
            raise ValueError(f"more than {limit:,} bytes")
        return stream.readall()


def read_text(path: Path) -> str:
    """The text of a file; a ValueError where it is none."""
    return read_bytes(path, LIMIT).decode()


def brief(error: BaseException) -> str:
    """What an error says, in a few words of one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = text.rpartition("I/O error: ")[2].partition(" (os error")[0]  # as safetensors words what the system said
    return " ".join(text.split())[:160] or type(error).__name__
