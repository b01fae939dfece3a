"""The folders of a run's checkpoints: their names, which one is meant, and which are deleted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.errors import ConfigError, brief
from utils.files import read_text

# as the writer writes it: step_004 is somebody else's
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")
POINTERS = ("latest", "best")


def steps_in(directory: Path) -> list[int]:
    """The steps that have a folder, newest first; also those that a crash left under the aside
    name.
    """
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


def replaced(folder: Path) -> Path:
    """The name of a step folder while a newer one of the same step takes its place."""
    if not folder.name:  # `.`, or the root
        folder = Path(os.path.abspath(folder))
    return folder.with_name(f".{folder.name}.replaced") if folder.name else folder


def resolved(folder: Path) -> Path:
    """The folder, or the aside folder that holds its content."""
    # The writer died between moving the old one aside and the new one in: the old one is the
    # checkpoint.
    return replaced(folder) if replaced(folder).is_dir() and not folder.is_dir() else folder


def pointed(pointer: Path) -> str:
    """The step folder that `latest` or `best` names; empty if none."""
    try:
        name = read_text(pointer).strip()
    except (OSError, ValueError):
        return ""
    return name if STEP_FOLDER.fullmatch(name) else ""


def identity(folder: Path) -> tuple[int, int] | None:
    """Distinguishes a folder from another one that took its name; None if it is gone."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove(path: Path) -> None:
    """Deletes a file or a whole folder; of a link, the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)  # one file that stays must not keep the others
    if path.exists():
        shutil.rmtree(path)  # says why


class Retention:
    """Deletes checkpoints that a run no longer keeps; reports a failure once and goes on."""

    def __init__(self, directory: Path, keep: int | None, say: Callable[[str], None]) -> None:
        self._directory, self._keep, self._say = directory, keep, say
        self._said: set[str] = set()

    def tidy(self) -> None:
        """Makes the directory, and removes what crashed writers left."""
        directory = self._directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            entries = list(directory.iterdir())
        except OSError as error:
            raise ConfigError(
                f"checkpoint_path: {directory} cannot be used ({brief(error)}); give a folder you"
                " may write to"
            ) from None
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
        """Renames a file or folder of the user's that has a name the writer needs."""
        if os.path.lexists(path):
            aside = _free(path, "old")
            path.rename(aside)
            self._tell(path, f"{path.name} was in the way and is now {aside.name}")

    def retire(self, step: int) -> None:
        """Deletes all but the newest and the best. Later steps belong to a course that the run has
        left.
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
            {f"step_{number}" for number in steps} - kept - {pointed(self._directory / "best")}
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
    # Renamed first: a folder that is half deleted must not look like a checkpoint.
    deleted = _free(folder.with_name(f".{folder.name}"), "deleted")
    resolved(folder).rename(deleted)
    remove(deleted)


def _free(path: Path, state: str) -> Path:
    """`path.state-1`, or with the next free number."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{state}-{number}")):
        number += 1
    return free
