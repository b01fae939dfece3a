"""The on-disk format of puzzle datasets, as HRM publishes them: one `dataset.json` and five arrays
per set and split.

Puzzle p's examples are rows puzzle_indices[p]:puzzle_indices[p+1]; group g's puzzles are
group_indices[g]:group_indices[g+1].
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from contract import IGNORE
from data.files import content_hash, open_array
from utils.errors import ConfigError, brief
from utils.files import read_json

# the arrays of a set, and their dimensions
ARRAYS = {
    "inputs": 2,
    "labels": 2,
    "puzzle_identifiers": 1,
    "puzzle_indices": 1,
    "group_indices": 1,
}
SAMPLED_ROWS = 1024  # rows read to recognise the kind of the puzzles
MOST_IDS = 2**31 - 1  # ids travel as int32
DAMAGED = "the dataset is damaged, build or download it again"
# sets name files, on reading and on evaluation
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]
Size = Annotated[int, Field(ge=1, le=MOST_IDS)]


@dataclass(frozen=True)
class PuzzleSet:
    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ARRAYS}


@dataclass(frozen=True)
class Metadata:
    """The entries of `dataset.json` that we use."""

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: Annotated[int, Field(ge=1, le=1 << 20)]  # more would fit no machine
    seq_len: Size
    num_puzzle_identifiers: Size
    sets: Annotated[tuple[SetName, ...], Field(min_length=1)]

    @property
    def ignored(self) -> int:
        """The label that counts nowhere: the dataset's own, or PyTorch's where it has none."""
        return IGNORE if self.ignore_label_id is None else self.ignore_label_id


METADATA = TypeAdapter(Metadata)


@dataclass(frozen=True)
class PuzzleSplit:
    where: str  # how messages name it: the user's key=value and the split's file
    metadata: Metadata
    sets: dict[str, PuzzleSet]
    folder: Path | None = None  # of the dataset, where it was read from one

    @cached_property
    def fingerprint(self) -> str:
        """Hashes metadata and arrays."""
        arrays = {
            f"{name} {field}": array
            for name, puzzles in sorted(self.sets.items())
            for field, array in puzzles.arrays().items()
        }
        content = json.dumps(asdict(self.metadata), sort_keys=True) + content_hash(arrays)
        return hashlib.sha256(content.encode()).hexdigest()


def plain_split(
    where: str, vocab_size: int, inputs: np.ndarray, labels: np.ndarray, copies: int
) -> PuzzleSplit:
    """Makes one set without puzzle identities: groups of `copies` puzzles of one example each."""
    rows, seq_len = inputs.shape
    # 0 is padding and the label to ignore, and the only id is that of no puzzle
    metadata = Metadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=1,
        sets=("all",),
    )
    index = np.int32 if rows < 2**31 else np.int64
    # every example is a puzzle, and a board's images are a group, of which an epoch visits one
    puzzles = PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=np.zeros(rows, np.int32),
        puzzle_indices=np.arange(rows + 1, dtype=index),
        group_indices=np.arange(0, rows + 1, copies, dtype=index),
    )
    return PuzzleSplit(where, metadata, {"all": puzzles})


def sample(rows: np.ndarray) -> np.ndarray:
    """Returns rows at even distances, the first and the last among them."""
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).astype(np.int64)]


def has_split(folder: Path, split: str) -> bool:
    # Path.is_file raises for names that no file can have
    return os.path.exists(folder / split / "dataset.json")


def read_split(key: str, folder: Path, split: str) -> PuzzleSplit:
    """Opens a split, memory-mapped and checked; `key` is the user's `key=value` for messages."""
    if not has_split(folder, split):
        option = " --validation" if split == "validation" else ""
        raise ConfigError(
            f"{key}: no {split}/dataset.json there; python -m data.build.NAME{option} builds it,"
            " see data/README.md"
        )
    where = f"{key}: {split}/dataset.json"
    # the dataset's own description, then whether its arrays agree
    metadata = read_json(folder / split / "dataset.json", METADATA, DAMAGED, where)
    entries = asdict(metadata)
    for name, bound in (
        ("pad_id", "vocab_size"),
        ("blank_identifier_id", "num_puzzle_identifiers"),
    ):
        if not 0 <= entries[name] < entries[bound]:
            raise _damaged(where, f"{name}={entries[name]} is not below {bound}={entries[bound]}")
    sets = {name: _read_set(key, folder, split, name) for name in metadata.sets}
    for name, puzzles in sets.items():
        _check_set(f"{key}: {split}/{name}", metadata, puzzles)
    return PuzzleSplit(f"{key}: {split}", metadata, sets, folder)


def _read_set(key: str, folder: Path, split: str, name: str) -> PuzzleSet:
    arrays = {}
    for field, dimensions in ARRAYS.items():
        file = f"{split}/{name}__{field}.npy"
        try:
            arrays[field] = open_array(folder / file, dimensions)
        except FileNotFoundError:
            raise _damaged(f"{key}: {file}", "is missing") from None
        except OSError as error:
            raise _damaged(f"{key}: {file}", f"cannot be read ({brief(error)})") from None
        except ValueError as error:
            raise _damaged(f"{key}: {file}", str(error)) from None
    return PuzzleSet(**arrays)


def _check_set(where: str, metadata: Metadata, puzzle_set: PuzzleSet) -> None:
    inputs, labels = puzzle_set.inputs, puzzle_set.labels
    if inputs.shape[1] != metadata.seq_len:
        raise _damaged(
            f"{where}__inputs.npy",
            f"has rows of {inputs.shape[1]}, but seq_len is {metadata.seq_len}",
        )
    if labels.shape != inputs.shape:
        raise _damaged(
            f"{where}__labels.npy", f"has shape {labels.shape}, but inputs {inputs.shape}"
        )
    # indices must rise from 0 to the end, or examples would be read from another puzzle
    puzzles, entries = len(puzzle_set.puzzle_identifiers), len(puzzle_set.puzzle_indices)
    if entries != puzzles + 1:
        raise _damaged(
            f"{where}__puzzle_indices.npy",
            f"has {entries} entries for {puzzles} puzzles, not {puzzles + 1}",
        )
    _check_rise(f"{where}__puzzle_indices.npy", puzzle_set.puzzle_indices, len(inputs), "rows")
    _check_rise(f"{where}__group_indices.npy", puzzle_set.group_indices, puzzles, "puzzles")
    if (np.diff(puzzle_set.group_indices) == 0).any():  # nothing could be drawn from it
        raise _damaged(f"{where}__group_indices.npy", "has a group without puzzles")
    # an id beyond the table would end in a device fault
    ids, bound = puzzle_set.puzzle_identifiers, metadata.num_puzzle_identifiers
    check_values(f"{where}__puzzle_identifiers.npy", ids, bound)


def _check_rise(where: str, indices: np.ndarray, end: int, parts: str) -> None:
    rises = len(indices) and indices[0] == 0 and indices[-1] == end
    if not rises or (indices[1:] < indices[:-1]).any():
        raise _damaged(where, f"does not rise from 0 to the {end} {parts}")


def check_values(where: str, values: np.ndarray, bound: int, allowed: int | None = None) -> None:
    """Raises ConfigError for a value that is neither in 0 … bound - 1 nor `allowed`. Values must
    have the file's type: a cast may wrap into the range.
    """
    if not values.size or (values.max() < bound and values.min() >= 0):
        return
    wrong = (values < 0) | (values >= bound)
    if allowed is not None:
        wrong &= values != allowed
    if wrong.any():
        raise _damaged(where, f"holds {values[wrong].flat[0]}, not in 0 … {bound - 1}")


def _damaged(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where} {what}; {DAMAGED}")
