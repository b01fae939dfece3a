"""Files that a reader or a crash finds whole, and reading what somebody else may have put in their place."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader, or a crash, finds the old text or the new one."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def read_row(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read. A pipe would hold up whoever opens it."""
    try:
        row = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}
