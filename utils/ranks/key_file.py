"""The key by which ranks know each other, in a file that only their user can read."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SEEN_S = 3.0  # how long a network disk may take to show one host what another wrote


@contextmanager
def offered(folder: Path) -> Iterator[tuple[str, str]]:
    """A fresh key, and the file that holds it meanwhile: in the folder, or the nearest one above it that there is yet.

    Where nothing can be written the file's name is empty.
    """
    key, above = secrets.token_hex(16), folder.absolute()
    while not os.path.isdir(above):  # `is_dir` raises for names that no folder can have
        above = above.parent
    file = above / f".ranks-{secrets.token_hex(4)}.key"
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        yield "", key
        return
    try:
        with open(descriptor, "w") as stream:
            stream.write(key)
        yield str(file), key
    finally:
        with suppress(OSError):
            file.unlink()


def read_key(file: str) -> str:
    """The key, or nothing where this process cannot see it."""
    deadline = time.monotonic() + SEEN_S
    while file:
        with suppress(OSError):
            if key := Path(file).read_text():
                return key
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return ""
