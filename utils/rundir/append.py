"""Files of a run that grow line by line, and survive a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from utils.errors import brief
from utils.files import read_bytes, write_whole


class Troubles:
    """Warns once that a file cannot be written; the run goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Wraps a write: an OSError is reported and ends nothing."""
        try:
            yield
        except OSError as error:
            if name not in self._said:
                self._said.add(name)  # before it is said, which writes to log.txt
                self._say(f"{name} cannot be written ({brief(error)}); training goes on")


class AppendedFile:
    """A file that grows by whole lines. If the disk refuses a line, only that line is lost.

    It is written without a buffer: a run that is killed leaves every line that it has written.
    """

    def __init__(self, path: Path, troubles: Troubles) -> None:
        self._name, self._troubles, self._lock = path.name, troubles, threading.Lock()
        if path.exists() and path.stat().st_nlink > 1:  # a hard link, as snapshots of a folder make
            write_whole(path, read_bytes(path))
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (open as long as the run)
        self._length = self._file.seek(0, os.SEEK_END)  # of the whole lines
        if self._length:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a former process died within a line: start a new one
                self.write("")

    def write(self, line: str) -> None:
        """Appends a line, or reports why it cannot."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._troubles.writing(self._name), self._lock:
            if self._file.closed:
                return
            try:
                if self._file.write(data) != len(data):  # as on a disk that has just become full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._length += len(data)
            except OSError:
                self._file.truncate(self._length)
                raise

    def close(self) -> None:
        with contextlib.suppress(OSError), self._lock:
            self._file.close()


def note(log: AppendedFile, text: str) -> None:
    """Writes a line with the time to log.txt."""
    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")


def keep_rows(file: Path, last: int, evaluation_due: bool) -> None:
    """Keeps the whole rows up to a step, and drops that step's evaluation where it is still due."""
    if not file.exists():
        return
    lines = read_bytes(file).splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _belongs(line, last, evaluation_due)]
    if len(kept) < len(lines):
        write_whole(file, b"".join(kept))


def _belongs(line: bytes, last: int, evaluation_due: bool) -> bool:
    try:
        row: Any = json.loads(line.decode())  # json would accept other encodings
    except ValueError:
        return False
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or step > last:
        return False
    return not (evaluation_due and step == last and any(name.startswith("eval/") for name in row))
