"""The folder of a run: a training locks it and moves a former run aside, an evaluation takes an
unused name.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from utils.errors import ConfigError, brief, visible
from utils.files import read_text

CONFIG_FILE = "config.yaml"
# the first line of that file, which tells a run's folder from any other
MARK = "# The resolved configuration of a run of lockstep\n"
WRITTEN = ("checkpoints", "evaluations")  # folders in a run's folder that it writes into


def lock(directory: Path) -> FileLock | None:
    """Locks a run's directory until `unlock`, or until this process dies. Returns None if another
    process has the lock; where the file system has no locks, all get one.
    """
    place = Path(os.path.realpath(directory))  # one lock for all spellings
    # beside the directory, so that it stays when a former run is moved aside
    held = FileLock(place.with_name(f".{place.name}.lock"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise creation_error(place, error) from None
    return held


def unlock(held: FileLock | None) -> None:
    """Gives a lock back and removes its file, if this process has one."""
    if held is not None and held.is_locked:
        # while it is still locked: a process that has opened it sees that it is gone
        with suppress(OSError):
            os.unlink(held.lock_file)
        held.release()


def make(directory: Path, move: bool) -> str:
    """Creates the directory. Returns the name to which a former run was moved, or an empty text."""
    moved = ""
    try:
        if move and is_run(directory):
            places = (directory.with_name(f"{directory.name}.old-{n}") for n in itertools.count(1))
            aside = next(place for place in places if not place.exists())
            directory.rename(aside)
            moved = aside.name
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise creation_error(directory, error) from None
    return moved


def make_another(directory: Path) -> Path:
    """Creates the directory, or `name-2`, `name-3` … where that holds files. Several processes may
    do so at once.
    """
    for number in itertools.count(1):
        chosen = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            chosen.mkdir(parents=True, exist_ok=True)
            if not _holds(chosen):
                # mode x: only one of several processes can create the file
                open(chosen / CONFIG_FILE, "x").close()
                break
        except FileExistsError:
            if not chosen.is_dir():
                raise ConfigError(f"checkpoint_path={chosen}: is a file; give a folder") from None
        except OSError as error:
            raise creation_error(chosen, error) from None
    return chosen


def is_run(directory: Path) -> bool:
    """Whether a run has begun in this folder."""
    try:
        return read_text(directory / CONFIG_FILE).startswith(MARK)
    except (OSError, ValueError):
        return False


def refuse_foreign(directory: Path) -> None:
    """Refuses a folder of other files than a run's, which the run would replace."""
    held = _holds(directory)
    if held and not is_run(directory):
        raise ConfigError(
            f"checkpoint_path={directory}: holds {visible(held)}, and no run has begun there; give"
            " an empty folder, or that of a run"
        )


def _holds(directory: Path) -> str:
    """Returns the name of what a folder holds, or an empty text. Empty folders for checkpoints or
    evaluations do not count.
    """
    found = (entry for entry in _entries(directory) if entry.name[0] != ".")
    return next((each.name for each in found if each.name not in WRITTEN or each.is_file()), "")


def refuse_links(directory: Path) -> None:
    """Refuses links within a run's folder: it may be a stranger's, and lead to any file.

    The folder itself may be a link, and W&B makes links.
    """
    for entry in _entries(directory):
        if entry.is_symlink():
            path = visible(os.path.relpath(entry.path, directory))
            raise ConfigError(
                f"checkpoint_path={directory}: {path} there is a link, and a run writes only into"
                " its own folder; remove it"
            )


def _entries(folder: Path | str, inside: str = "") -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        yield entry
        if entry.is_dir(follow_symlinks=False) and (inside or entry.name) in WRITTEN:
            yield from _entries(entry.path, inside or entry.name)


def creation_error(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"checkpoint_path={directory}: cannot be made ({brief(error)}); give a folder you may"
        " write to"
    )
