"""The manifest of a checkpoint: size and sha256 of its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.errors import brief
from utils.files import open_plain, read_text

MANIFEST = "manifest.json"
CHUNK = 1 << 23  # large, so that a thread that hashes seldom asks for the interpreter
Entry = dict[str, int | str]


def text_of(files: Mapping[str, Mapping[str, int | str]]) -> str:
    """The manifest as text, with a sha256 of its own content."""
    known = {name: dict(entry) for name, entry in sorted(files.items())}
    own = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({"files": known, "sha256": own}, indent=1) + "\n"


def entry_of(file: Path) -> Entry:
    """The manifest's entry for a file."""
    total, size = hashlib.sha256(), file.stat().st_size
    hash_into(total, file, 0, size)
    return {"bytes": size, "sha256": total.hexdigest()}


def damage(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, hashed: bool = True
) -> str:
    """Empty if the files, or those `wanted`, are as they were written; else one line with the file
    and the damage. Unless they are `hashed`, files of tensors need only be of the right size.
    """
    try:
        files = _read(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST}: " + (
            "missing"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read ({brief(error)})"
        )
    # Notes of a user or of a desktop are passed over, because nothing here reads them.
    present = {entry.name for entry in folder.glob("[!.]*.safetensors")}
    for name in sorted(filter(wanted, files.keys() | present)):
        try:
            checks_hash = hashed or not name.endswith(".safetensors")
            problem = _file_damage(folder / name, files.get(name), checks_hash)
        except OSError as error:
            problem = f"cannot be read ({brief(error)})"
        if problem:
            return f"{name}: {problem}"
    return ""


def recorded_sha256(folder: Path) -> dict[str, str]:
    """Returns the sha256 of every file that the manifest names; empty if there is no manifest."""
    if not (folder / MANIFEST).exists():
        return {}
    return {name: str(entry["sha256"]) for name, entry in _read(folder).items()}


def hash_into(total: Any, file: Path, start: int, size: int) -> None:
    """Hashes a part of a file."""
    chunk = memoryview(bytearray(min(CHUNK, max(1, size))))
    with open_plain(file) as stream:
        stream.seek(start)
        while size > 0 and (count := stream.readinto(chunk[: min(CHUNK, size)])):
            total.update(chunk[:count])
            size -= count


def _file_damage(file: Path, expected: Mapping[str, int | str] | None, hashed: bool) -> str:
    if expected is None:
        return f"unknown to {MANIFEST}"
    if not file.is_file():
        return "not a plain file" if os.path.lexists(file) else "missing"
    if (size := file.stat().st_size) != expected.get("bytes"):
        return f"{size} of {expected.get('bytes')} bytes"
    if not hashed:
        return ""
    return "" if entry_of(file) == expected else "sha256 differs"


def _read(folder: Path) -> dict[str, Entry]:
    text = read_text(folder / MANIFEST)
    try:
        files = json.loads(text)["files"]
        same = text_of(files) == text
    except (KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError("its own sha256 differs")
    for name in files:
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise ValueError(f"names {name!r}, which is no file of this folder")
    return files
