"""Code that dataset builders share: one-line errors, and datasets written whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.recursive.puzzle_files import PuzzleSplit
from utils.errors import ConfigError, brief

IDENTIFIERS, TEST_PUZZLES = "identifiers.json", "test_puzzles.json"


@dataclass(frozen=True)
class Pieces:
    """An array too large for memory: its rows are made while they are written."""

    shape: tuple[int, ...]
    make: Callable[[], Iterator[np.ndarray]]

    def __len__(self) -> int:
        return self.shape[0]


class Parser(argparse.ArgumentParser):
    """The command line of a builder, with its output folder. A wrong option is one line."""

    def __init__(self, name: str, about: str | None) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"data.build.{name}", description=about, formatter_class=shape)
        self.add_argument("--output-dir", required=True, type=Path, help="a new or empty folder")

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


def progress(total: int | None, unit: str, scale: bool = False) -> tqdm:
    """A progress bar for what takes more than a second. In a file it moves every ten seconds."""
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit=unit, unit_scale=scale, delay=1, mininterval=pause)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder beside `folder` to write to, and renames it at the end: `folder` holds the
    whole dataset or nothing.
    """
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--output-dir {folder}: exists and is not empty; choose another folder, or remove it"
        )
    # on the same file system, so that renaming is one step
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(folder)
    except MemoryError as error:  # NumPy's says how much was asked for
        raise ConfigError(
            f"too much for this machine ({brief(error)}); ask for fewer puzzles or images"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_puzzles(folder: Path, splits: Mapping[str, PuzzleSplit], identifiers: list[str]) -> None:
    """Writes the splits of a dataset, and the name of each puzzle id."""
    # one file for each array, as HRM's and TRM's loaders expect
    (folder / IDENTIFIERS).write_text(json.dumps(identifiers))
    for split_name, split in splits.items():
        (folder / split_name).mkdir()
        for name, puzzles in split.sets.items():
            for field, array in puzzles.arrays().items():
                _write_array(folder / split_name / f"{name}__{field}.npy", array)
        # what HRM's and TRM's own code reads besides
        sets = split.sets.values()
        examples = sum(len(puzzles.inputs) for puzzles in sets)
        total = sum(len(puzzles.puzzle_identifiers) for puzzles in sets)
        content = asdict(split.metadata) | {
            "total_groups": sum(len(puzzles.group_indices) - 1 for puzzles in sets),
            "total_puzzles": total,
            "mean_puzzle_examples": examples / max(1, total),
        }
        (folder / split_name / "dataset.json").write_text(json.dumps(content, indent=1))


def _write_array(path: Path, array: np.ndarray | Pieces) -> None:
    if not isinstance(array, Pieces):
        np.save(path, array)
        return
    # the header that NumPy would write, then the rows as they are made
    header = {"descr": "|u1", "fortran_order": False, "shape": array.shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in array.make():
            piece.tofile(file)
