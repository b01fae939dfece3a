"""Code that dataset builders share: one-line errors, and datasets written whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.recursive.puzzle_files import PuzzleSplit, begin_digest, digest_line
from utils.errors import ConfigError

IDENTIFIERS, TEST_PUZZLES = "identifiers.json", "test_puzzles.json"
FILES = (IDENTIFIERS, TEST_PUZZLES)  # beside the splits


@dataclass(frozen=True)
class Pieces:
    """Stands for an array that is too large for memory: rows are made while they are written."""

    shape: tuple[int, ...]
    make: Callable[[], Iterator[np.ndarray]]
    dtype: Any = np.dtype(np.uint8)  # noqa: RUF009

    def __len__(self) -> int:
        return self.shape[0]


class Parser(argparse.ArgumentParser):
    """The command line of a builder, with its output folder. A wrong option is one line."""

    def __init__(self, name: str, about: str | None) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"data.build.{name}", description=about, formatter_class=shape)
        self.add_argument(
            "--output-dir",
            required=True,
            help="folder of the dataset; an earlier dataset there is replaced",
        )

    def error(self, message: str) -> Any:
        raise ConfigError(f"{self.prog}: {message}; see --help")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number from `least` to `most`."""

    def parsed(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bound = "" if most is None else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"{value}: must be at least {least}{bound}")
        return value

    parsed.__name__ = "whole number"
    return parsed


def check_output(folder: Path, splits: tuple[str, ...] = ("train", "test")) -> None:
    """Raises ConfigError if the folder holds anything but an earlier dataset."""
    if not os.path.exists(folder):  # Path.exists raises for names that no file can have
        return
    strangers = (
        ["it is a file"]
        if not folder.is_dir()
        else sorted(p.name for p in folder.iterdir() if p.name not in (*splits, *FILES))
    )
    if (
        not strangers
        and any(folder.iterdir())
        and not any((folder / split / "dataset.json").is_file() for split in splits)
    ):
        strangers = ["no dataset.json"]
    if strangers:
        raise ConfigError(
            f"--output-dir {folder}: exists and is not a dataset ({strangers[0]}); choose another"
            " folder or empty this one"
        )


def write_dataset(
    folder: Path, splits: Mapping[str, PuzzleSplit], identifiers: list[str],
    others: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Writes a dataset aside, then renames it: the folder holds the old dataset or the new one,
    never half of one. `others` are texts by file name.
    """
    check_output(folder)
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    try:
        for name, split in splits.items():
            _write_split(aside / name, split)
        for name, text in {IDENTIFIERS: json.dumps(identifiers), **(others or {})}.items():
            _write_text(aside / name, text)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if os.path.exists(old) and not os.path.exists(folder):
            old.rename(folder)
        raise ConfigError(
            f"--output-dir {folder}: cannot be written ({error.strerror}); choose another folder"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_split(folder: Path, split: PuzzleSplit) -> None:
    folder.mkdir(parents=True)
    digest = begin_digest(split.metadata)  # as content_fingerprint has it, of what is seen once
    for name, puzzle_set in sorted(split.sets.items()):
        for field, array in puzzle_set.arrays().items():
            digest.update(digest_line(name, field, array))
            _write_array(folder / f"{name}__{field}.npy", array, digest)
    examples = sum(len(one.inputs) for one in split.sets.values())
    puzzles = sum(len(one.puzzle_identifiers) for one in split.sets.values())
    content = asdict(split.metadata) | {
        "sets": list(split.metadata.sets),
        "total_groups": sum(len(one.group_indices) - 1 for one in split.sets.values()),
        "total_puzzles": puzzles,
        "mean_puzzle_examples": examples / max(1, puzzles),
        "fingerprint": digest.hexdigest(),
    }
    _write_text(folder / "dataset.json", json.dumps(content, indent=1))


def _write_array(path: Path, array: np.ndarray | Pieces, digest: Any) -> None:
    """Writes an array as np.save does, and hashes its bytes."""
    header = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in array.make() if isinstance(array, Pieces) else [array]:
            values = np.ascontiguousarray(piece).data
            file.write(values)
            digest.update(values)
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
