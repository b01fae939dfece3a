"""The folders of a run's checkpoints: their names, pointers to them, and which are deleted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.errors import ConfigError, brief
from utils.files import read_text

# as the writer writes it, without leading zeros: step_004 is not ours
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")
POINTERS = ("latest", "best")


def steps_in(directory: Path) -> list[int]:
    """Returns the steps that have a folder, newest first; a crash may have left it set aside."""
    names = (
        [entry.name for entry in directory.iterdir() if entry.is_dir()]
        if directory.is_dir()
        else []
    )
    names = [
        (
            name[1:].removesuffix(".replaced")
            if name.startswith(".") and name.endswith(".replaced")
            else name
        )
        for name in names
    ]
    return sorted(
        {int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))}, reverse=True
    )


def aside_of(folder: Path) -> Path:
    """Returns the name for a step folder that is set aside while a newer one replaces it."""
    if not folder.name:  # `.`, or the root
        folder = Path(os.path.abspath(folder))
    return folder.with_name(f".{folder.name}.replaced") if folder.name else folder


def folder_or_aside(folder: Path) -> Path:
    """Returns the folder, or if it is missing, the one that was set aside."""
    # if the writer died before it moved the new folder in, the old one is the checkpoint
    return aside_of(folder) if aside_of(folder).is_dir() and not folder.is_dir() else folder


def read_pointer(pointer: Path) -> str:
    """Returns the name of the step folder that `latest` or `best` points to, or an empty string."""
    try:
        name = read_text(pointer).strip()
    except (OSError, ValueError):
        return ""
    return name if STEP_FOLDER.fullmatch(name) else ""


def identity(folder: Path) -> tuple[int, int] | None:
    """Returns numbers that distinguish a folder from a later one of the same name, or None if it
    is gone.
    """
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove(path: Path) -> None:
    """Deletes a file, a folder with its content, or a link, but not what the link points to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)  # deletes as much as possible
    if path.exists():
        shutil.rmtree(path)  # raises the error


class Retention:
    """Deletes checkpoints that a run no longer keeps; reports a failure once and goes on."""

    def __init__(self, directory: Path, keep: int | None, say: Callable[[str], None]) -> None:
        self._directory, self._keep, self._say = directory, keep, say
        self._said: set[str] = set()

    def tidy(self) -> None:
        """Makes the directory, points to a checkpoint that a crashed writer had moved in, and
        removes what else crashed writers left.
        """
        directory = self._directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            entries = list(directory.iterdir())
        except OSError as error:
            raise ConfigError(
                f"checkpoint_path: {directory} cannot be used ({brief(error)}); give a folder you"
                " may write to"
            ) from None
        for pointer in POINTERS:
            aside = directory / f".{pointer}.writing"
            if (name := read_pointer(aside)) and (directory / name).is_dir():
                with contextlib.suppress(OSError):
                    aside.replace(directory / pointer)
        for entry in entries:
            inner, _, state = entry.name.removeprefix(".").partition(".")
            if not entry.name.startswith(".") or not (
                STEP_FOLDER.fullmatch(inner) or inner in POINTERS
            ):
                continue
            if state.startswith(("writing", "deleted")) or (
                state == "replaced" and (directory / inner).is_dir()
            ):
                self._attempt(entry, remove)

    def make_way(self, path: Path) -> None:
        """Renames a user's file or folder whose name the writer needs."""
        if os.path.lexists(path):
            aside = _free(path, "old")
            path.rename(aside)
            self._tell(path, f"{path.name} was in the way and is now {aside.name}")

    def retire(self, step: int) -> None:
        """Deletes all checkpoints except the newest and the best. Those of later steps belong to an
        attempt that the run has gone back from.
        """
        if self._keep is None:
            return
        try:
            steps = steps_in(self._directory)
        except OSError as error:
            return self._tell(self._directory, f"old ones cannot be deleted ({brief(error)})")
        kept = {
            f"step_{number}"
            for number in [number for number in steps if number <= step][: self._keep]
        }
        for name in sorted(
            {f"step_{number}" for number in steps} - kept - {read_pointer(self._directory / "best")}
        ):
            self._attempt(self._directory / name, _delete)

    def _attempt(self, path: Path, delete: Callable[[Path], None]) -> None:
        try:
            delete(path)
        except OSError as error:
            self._tell(
                path,
                f"{path.name} cannot be deleted ({brief(error)}) and still takes its room; delete"
                " it yourself",
            )

    def _tell(self, path: Path, text: str) -> None:
        if path.name not in self._said:
            self._said.add(path.name)
            with contextlib.suppress(Exception):  # the log may lie on the same troubled disk
                self._say(f"checkpoints: {text}")


def _delete(folder: Path) -> None:
    # renamed first, so that a folder that is half deleted never looks like a checkpoint
    deleted = _free(folder.with_name(f".{folder.name}"), "deleted")
    folder_or_aside(folder).rename(deleted)
    remove(deleted)


def _free(path: Path, state: str) -> Path:
    """Returns `path.state-1`, or with the first number that is not taken."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{state}-{number}")):
        number += 1
    return free
