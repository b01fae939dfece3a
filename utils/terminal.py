"""Tells whether output can be overwritten in place."""

from __future__ import annotations

import os
from typing import TextIO

CLEAR = "\r\x1b[K"  # to the beginning of the line, and nothing left of it


def redrawable(stream: TextIO | None) -> bool:
    """Returns whether a stream is a terminal that knows escape codes, as TERM says."""
    try:
        return (
            stream is not None
            and stream.isatty()
            and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        )
    except (OSError, ValueError):  # closed
        return False
