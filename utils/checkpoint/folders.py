"""The folders of a run's checkpoints: their names, pointers to them, and which are deleted."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.errors import ConfigError, brief
from utils.files import read_text

# as the writer names it, without leading zeros: step_004 is not ours
STEP = re.compile(r"step_(0|[1-9][0-9]*)")
# `latest` is the name by which tools and people find the newest checkpoint. A run itself goes on
# from the highest step that is whole, so that a pointer that is lost or behind costs it nothing.
POINTERS = ("latest", "best")
# what a crash may leave: a folder or pointer in the making, a folder half deleted, and one that
# was to be replaced by a newer one of the same step
LEFTOVER = re.compile(r"\.(step_[0-9]+|latest|best)\.(writing|deleted|replaced).*")


def steps_in(directory: Path) -> list[int]:
    """Returns the steps that have a folder, newest first."""
    if not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.is_dir()]
    return sorted(
        {int(match[1]) for name in names if (match := STEP.fullmatch(name))}, reverse=True
    )


def read_pointer(pointer: Path) -> str:
    """Returns the name of the step folder that `latest` or `best` points to, or an empty string."""
    try:
        name = read_text(pointer).strip()
    except (OSError, ValueError):
        return ""
    return name if STEP.fullmatch(name) else ""


def replaced(folder: Path) -> Path:
    """Returns the name that a step folder has while a newer one of that step takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def put_back(directory: Path) -> None:
    """Restores a checkpoint if the writer died before the newer one of that step was in place."""
    for entry in directory.glob(".step_*.replaced"):
        folder = directory / entry.name[1:].removesuffix(".replaced")
        if not folder.exists():
            entry.rename(folder)


def tidy(directory: Path, say: Callable[[str], None]) -> None:
    """Makes the directory, finishes what a crashed writer had almost done, and removes what else it
    left.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        put_back(directory)
        entries = list(directory.iterdir())
    except OSError as error:
        raise ConfigError(
            f"checkpoint_path: {directory} cannot be used ({brief(error)}); give a folder you"
            " may write to"
        ) from None
    for name in POINTERS:
        new = directory / f".{name}.writing"
        if (step := read_pointer(new)) and (directory / step).is_dir():
            with contextlib.suppress(OSError):
                new.replace(directory / name)
    for entry in entries:
        if LEFTOVER.fullmatch(entry.name):
            delete(entry, say)


def retire(directory: Path, step: int, keep: int | None, say: Callable[[str], None]) -> None:
    """Deletes all checkpoints except the best and, up to `step`, the newest `keep` ones. Later ones
    belong to an attempt that the run has gone back from.
    """
    if keep is None:
        return
    steps = steps_in(directory)
    kept = {f"step_{number}" for number in [other for other in steps if other <= step][:keep]}
    kept.add(read_pointer(directory / "best"))
    for name in [f"step_{number}" for number in steps]:
        if name not in kept:
            delete(directory / name, say)


def delete(path: Path, say: Callable[[str], None]) -> None:
    """Deletes a checkpoint or a leftover, or logs that it cannot."""
    try:
        remove(path)
    except OSError as error:
        with contextlib.suppress(Exception):  # the log may be on the same failing disk
            say(f"checkpoints: {path.name} cannot be deleted ({brief(error)}); delete it yourself")


def remove(path: Path) -> None:
    """Deletes a file, a folder with its content, or a link, but not what the link points to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if STEP.fullmatch(path.name):
        # renamed first, so that a folder that is half deleted never looks like a checkpoint
        deleted = path.with_name(f".{path.name}.deleted")
        remove(deleted)
        path = path.rename(deleted)
    shutil.rmtree(path)
