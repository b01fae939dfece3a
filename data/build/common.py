"""What dataset builders share: one line for a wrong command, and puzzles written whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np

from data.puzzle_files import PuzzleSplit, content_fingerprint
from utils.errors import ConfigError

IDENTIFIERS = "identifiers.json"


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def end_with_parent() -> None:
    """For a thread of a worker process: who is killed takes nobody along."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def check_output(folder: Path, splits: tuple[str, ...] = ("train", "test")) -> None:
    """Refuse to replace anything but an earlier dataset; called before the work starts."""
    if not os.path.exists(folder):  # Path.exists raises for names that no file can have
        return
    strangers = (
        ["it is a file"] if not folder.is_dir() else sorted(p.name for p in folder.iterdir() if p.name not in (*splits, IDENTIFIERS))
    )
    if not strangers and any(folder.iterdir()) and not any((folder / split / "dataset.json").is_file() for split in splits):
        strangers = ["no dataset.json"]
    if strangers:
        raise ConfigError(f"--output-dir {folder}: exists and is not a dataset ({strangers[0]}); choose another folder or empty this one")


def write_dataset(
    folder: Path, splits: dict[str, PuzzleSplit], identifiers: list[str], ratings: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write aside, then rename: the folder holds the old dataset or the new one, never half of one.

    How hard the groups of a split are, where it is known, stands beside its arrays.
    """
    check_output(folder)
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    try:
        for name, split in splits.items():
            _write_split(aside / name, split)
            if ratings is not None:
                _write_array(aside / name / "all__ratings.npy", ratings[name])
        _write_text(aside / IDENTIFIERS, json.dumps(identifiers))
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if os.path.exists(old) and not os.path.exists(folder):
            old.rename(folder)
        raise ConfigError(f"--output-dir {folder}: cannot be written ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_split(folder: Path, split: PuzzleSplit) -> None:
    folder.mkdir(parents=True)
    for name, puzzle_set in split.sets.items():
        for field, array in puzzle_set.arrays().items():
            _write_array(folder / f"{name}__{field}.npy", array)
    examples = sum(len(one.inputs) for one in split.sets.values())
    puzzles = sum(len(one.puzzle_identifiers) for one in split.sets.values())
    content = asdict(split.metadata) | {
        "sets": list(split.metadata.sets),
        "total_groups": sum(len(one.group_indices) - 1 for one in split.sets.values()),
        "mean_puzzle_examples": examples / max(1, puzzles),
        "fingerprint": split.fingerprint or content_fingerprint(split),
    }
    _write_text(folder / "dataset.json", json.dumps(content, indent=1))


def _write_array(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
