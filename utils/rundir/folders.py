"""The folder of a run: a training moves a former run aside, an evaluation takes an unused name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from utils.errors import ConfigError, brief, visible

# What tells a run directory from a folder that something else (Hydra, a user) has made.
MARKS = ("config.yaml", "metrics.jsonl", "log.txt", "checkpoints")
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "log.txt", "status.json")
WRITTEN = ("checkpoints", "evaluations")  # folders in a run's folder that it writes into
OF_CHECKPOINTS = re.compile(r"checkpoints|latest|meta\.json|manifest\.json|step_\d+")


def make(directory: Path, move: bool) -> str:
    """Creates the directory. Returns the name to which a former run was moved, or an empty text."""
    moved = ""
    try:
        if move and any((directory / mark).exists() for mark in MARKS):
            names = (
                directory.with_name(f"{directory.name}.old-{number}")
                for number in itertools.count(1)
            )
            directory.rename(aside := next(name for name in names if not name.exists()))
            moved = aside.name
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise creation_error(directory, error) from None
    return moved


def make_another(directory: Path) -> Path:
    """Creates the directory, or `name-2`, `name-3` … where a run exists, without races."""
    for number in itertools.count(1):
        chosen = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            chosen.mkdir(parents=True, exist_ok=True)
            if not any((chosen / mark).exists() for mark in MARKS):
                # only one of several processes can create it
                open(chosen / MARKS[0], "x").close()
                break
        except FileExistsError:
            if not chosen.is_dir():
                raise ConfigError(f"checkpoint_path={chosen}: is a file; give a folder") from None
        except OSError as error:
            raise creation_error(chosen, error) from None
    return chosen


def refuse_checkpoints(directory: Path) -> None:
    """Refuses a folder with checkpoints: an evaluation writes nothing beside a training."""
    try:
        names = (
            [entry.name for entry in directory.iterdir() if OF_CHECKPOINTS.fullmatch(entry.name)]
            if directory.is_dir()
            else []
        )
    except OSError as error:
        raise creation_error(directory, error) from None
    if names:
        raise ConfigError(
            f"checkpoint_path={directory}: holds checkpoints ({min(names)}), beside which an"
            " evaluation writes nothing; give another folder, or leave checkpoint_path out"
        )


def refuse_inside(directory: Path) -> None:
    """Refuses a folder within another run's checkpoints, which that run may delete."""
    for folder in [directory, *Path(os.path.abspath(directory)).parents][:4]:
        if marker := next(
            (
                name
                for name in ("meta.json", "manifest.json", "latest")
                if os.path.isfile(folder / name)
            ),
            "",
        ):
            raise ConfigError(
                f"checkpoint_path={directory}: {folder} belongs to a run's checkpoints ({marker});"
                " give the folder of a run"
            )


def refuse_links(directory: Path) -> None:
    """Refuses links within a run's folder: it may be a stranger's, and lead to any file.

    The folder itself may be a link, and W&B makes links of its own.
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


def check_files(directory: Path) -> None:
    """Refuses pipes and folders in place of the run's files."""
    for name in FILES:
        if (directory / name).exists() and not (directory / name).is_file():
            raise ConfigError(
                f"checkpoint_path={directory}: {name} there is no regular file; move it away, or"
                " give another run_name"
            )


def creation_error(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"checkpoint_path={directory}: cannot be made ({brief(error)}); give a folder you may"
        " write to"
    )
