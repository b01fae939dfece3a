"""Compiles a C file with the machine's compiler, once for each version of the file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC")
TIMEOUT = 120.0  # seconds for the compiler


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """The file as a library, compiled unless the user's cache has it; None if the compiler is
    missing or fails. The environment variable CC names it, and is empty to use none.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler:
            return None
        # a home may be shared between machines of different kinds
        key = (*compiler, *FLAGS, platform.machine(), *platform.libc_ver(), source.read_text())
        built = cache_folder() / f"{source.stem}-{sha256(repr(key).encode()).hexdigest()[:32]}.so"
        with contextlib.suppress(OSError):  # not there yet, or cut short by a crash
            return ctypes.CDLL(str(built))
        _compile(compiler, source, built)
        return ctypes.CDLL(str(built))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "lockstep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _compile(compiler: list[str], source: Path, built: Path) -> None:
    # processes may do this side by side: each compiles for itself, and the last rename stays
    with tempfile.TemporaryDirectory(dir=built.parent) as aside:
        made = Path(aside) / built.name
        command = [*compiler, *FLAGS, "-o", str(made), str(source)]
        subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
        os.replace(made, built)
