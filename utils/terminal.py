"""Whether what has been written can be written over."""

from __future__ import annotations

import os
from typing import TextIO

CLEAR = "\r\x1b[K"  # to the beginning of the line, and nothing left of it


def redrawable(stream: TextIO | None) -> bool:
    """A terminal that knows escape codes; TERM tells, and where it does not, nobody promises that it is one."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    except (OSError, ValueError):  # closed
        return False
