"""Files of a run that grow line by line, and survive a full disk."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from utils.errors import brief
from utils.files import read_bytes, write_whole

REPEAT_S = 60.0  # a disk that keeps filling up is reported at most this often


class Troubles:
    """Reports once that a file cannot be written, and once that it can be written again."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._failing: set[str] = set()
        self._reported_at: dict[str, float] = {}

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Wraps a write: an OSError is reported and ends nothing."""
        try:
            yield
        except OSError as error:
            now = time.monotonic()
            if (
                name not in self._failing
                and now - self._reported_at.get(name, -math.inf) >= REPEAT_S
            ):
                self._failing.add(name)
                self._reported_at[name] = now
                self._report(name, f"{name} cannot be written ({brief(error)}); training goes on")
        else:
            if name in self._failing:
                self._failing.discard(name)
                self._report(name, f"{name} can be written again")


class AppendedFile:
    """A file that grows by whole lines. If the disk refuses a line, only that line is lost."""

    def __init__(self, path: Path, troubles: Troubles) -> None:
        self._name, self._troubles, self._lock = path.name, troubles, threading.Lock()
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (open as long as the run)
        # the length to cut the file back to, if a write fails in the middle of a line
        self._torn: int | None = None
        if (
            self._file.seek(0, os.SEEK_END)
            and (self._file.seek(-1, os.SEEK_END), self._file.read(1))[1] != b"\n"
        ):
            # a former process died within a line; start a new one
            self.write("")

    def write(self, line: str) -> None:
        """Appends a line, or reports why it cannot."""
        with self._troubles.writing(self._name), self._lock:
            if not self._file.closed:
                self._append(f"{line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        with contextlib.suppress(OSError), self._lock:
            self._file.close()

    def _append(self, data: bytes) -> None:
        self._cut()
        self._torn = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._cut()
            raise
        self._torn = None

    def _cut(self) -> None:
        if self._torn is not None:
            self._file.truncate(self._torn)
            self._torn = None


def steps_evaluated(path: Path) -> set[int]:
    """Returns the steps of metrics.jsonl that have an evaluation."""
    evaluated = set()
    for line in read_bytes(path).splitlines():
        if b'"eval/' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                evaluated.add(int(json.loads(line)["step"]))
    return evaluated


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
    except (ValueError, RecursionError):
        return False
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or step > last:
        return False
    return not (evaluation_due and step == last and any(name.startswith("eval/") for name in row))
