"""Joins puzzle datasets into one: numbers rows, puzzles and groups consecutively, and keeps puzzle
ids apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from contract import IGNORE, Arrays, Examples
from data.recursive.puzzle_files import PuzzleSet, PuzzleSplit, check_values, has_split, read_split
from data.recursive.sudoku_boards import generate, sudoku_split
from utils.command.marks import Keys
from utils.errors import ConfigError


@dataclass(frozen=True)
class Member:
    """A set of a dataset, as a part of the whole."""

    split: PuzzleSplit
    set_name: str
    id_offset: int = 0  # added to its puzzle ids
    prefix: str = ""  # put before the set's name, where several datasets have sets

    @property
    def name(self) -> str:
        return self.prefix + self.set_name

    @property
    def puzzles(self) -> PuzzleSet:
        return self.split.sets[self.set_name]

    @property
    def identifiers(self) -> np.ndarray:
        """The ids of its puzzles, as all datasets count them."""
        return (self.puzzles.puzzle_identifiers.astype(np.int64) + self.id_offset).astype(np.int32)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels of these rows. Labels to ignore become IGNORE."""
        inputs = self.puzzles.inputs.take(rows, axis=0)
        labels = self.puzzles.labels.take(rows, axis=0)
        vocab_size, ignored = self.split.metadata.vocab_size, self.split.metadata.ignored
        # a token without an embedding would end in a device fault
        where = f"{self.split.where}/{self.set_name}"
        check_values(f"{where}__inputs.npy", inputs, vocab_size)
        check_values(f"{where}__labels.npy", labels, vocab_size, ignored)
        converted = labels.astype(np.int32)
        if ignored != IGNORE:
            np.putmask(converted, labels == ignored, IGNORE)
        return inputs.astype(np.int32), converted


class Pool:
    """The rows, puzzles and groups of several sets, each with consecutive numbers."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        first, size, group_first, group_size = [], [], [], []
        rows = puzzles = 0  # in the members before
        for member in members:
            puzzle_set = member.puzzles
            first.append(puzzle_set.puzzle_indices[:-1].astype(np.int64) + rows)
            size.append(np.diff(puzzle_set.puzzle_indices).astype(np.int64))
            group_first.append(puzzle_set.group_indices[:-1].astype(np.int64) + puzzles)
            group_size.append(np.diff(puzzle_set.group_indices).astype(np.int64))
            rows += len(puzzle_set.inputs)
            puzzles += len(puzzle_set.puzzle_identifiers)
        # of each puzzle: its first row, the number of its rows, and its id
        self.first, self.size = np.concatenate(first), np.concatenate(size)
        self.identifier = np.concatenate([member.identifiers for member in members])
        # of each group: its first puzzle, and the number of its puzzles
        self.group_first, self.group_size = np.concatenate(group_first), np.concatenate(group_size)
        self._ends = np.cumsum([len(member.puzzles.inputs) for member in members])  # of their rows
        if not len(self.group_first):
            raise ConfigError(
                "data_path: the training sets hold no puzzles; build the dataset again"
            )

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(self._members) == 1:
            return self._members[0].read(rows)
        seq_len = self._members[0].split.metadata.seq_len
        inputs, labels = np.empty((2, len(rows), seq_len), np.int32)
        # rows of one set are read together, and put where they were asked for
        owner = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(owner):
            owned = owner == number
            before = self._ends[number - 1] if number else 0
            inputs[owned], labels[owned] = self._members[number].read(rows[owned] - before)
        return inputs, labels


class PuzzleEvalSet(Examples):
    def __init__(self, member: Member) -> None:
        self._member, self._identifiers = member, member.identifiers
        self._first = member.puzzles.puzzle_indices.astype(np.int64)  # row of each puzzle

    def __len__(self) -> int:
        return len(self._member.puzzles.inputs)

    def read(self, indices: np.ndarray) -> Arrays:
        inputs, labels = self._member.read(indices)
        puzzle = np.searchsorted(self._first, indices, side="right") - 1
        return {"inputs": inputs, "labels": labels, "puzzle_identifiers": self._identifiers[puzzle]}

    def padding(self, rows: int) -> Arrays:
        metadata = self._member.split.metadata
        shape, blank = (rows, metadata.seq_len), metadata.blank_identifier_id
        return {
            "inputs": np.full(shape, metadata.pad_id, np.int32),
            "labels": np.full(shape, IGNORE, np.int32),
            "puzzle_identifiers": np.full(rows, blank + self._member.id_offset, np.int32),
        }


class EmbeddedKeys(Keys):
    """Generated Sudoku, where no dataset is given."""

    size: Literal[4, 6, 9, 16]
    """Rows of a board"""

    train: PositiveInt
    """Boards to train on"""

    test: PositiveInt
    """Boards to evaluate on"""

    blanks: PositiveInt
    """Blank cells of a board"""

    num_aug: NonNegativeInt
    """Images of every training board under random symmetries"""

    seed: NonNegativeInt
    """Another seed gives other boards"""


def open_datasets(
    data_path: str | None,
    data_paths: Sequence[str] | None,
    data_paths_test: Sequence[str] | None,
    embedded: EmbeddedKeys | None,
    eval_split: str,
) -> tuple[list[Member], list[Member]]:
    """Opens the splits to train and to evaluate on that the user's keys name, or the embedded
    Sudoku.
    """
    if data_path is not None and data_paths:
        raise ConfigError(
            f"data_path={data_path} and data_paths={list(data_paths)} are both given; keep one of"
            " them"
        )
    # a user's datasets, under whichever key they were given
    key = "data_path" if data_path is not None else "data_paths"
    if paths := [data_path] if data_path is not None else list(data_paths or []):
        train = _open_train(key, paths)
        test = _open_test(key, paths, list(data_paths_test or []), train, eval_split)
        return [member for dataset in train for member in _members(*dataset)], test
    if data_paths_test:
        raise ConfigError(
            f"data_paths_test={list(data_paths_test)} needs training data; give data_paths as well"
        )
    # without any dataset, boards that are generated here
    if not embedded:
        raise ConfigError("data_path=null: there is no dataset to train on; give data_path=FOLDER")
    if eval_split != "test":
        raise ConfigError(
            f"data.eval_split={eval_split}: generated boards have none; give data_path=FOLDER that"
            " was built with --validation"
        )
    train_split, test_split = embedded_sudoku(embedded)
    return _members(train_split), _members(test_split)


def embedded_sudoku(keys: EmbeddedKeys) -> tuple[PuzzleSplit, PuzzleSplit]:
    """Generates boards (2,000 of size 6 in a fifth of a second). Only training boards are
    augmented.
    """
    where, size, seed = "data.embedded", keys.size, keys.seed
    try:
        trained, held_out = generate(size, (keys.train, keys.test), keys.blanks, seed)
        return (
            sudoku_split(where, size, *trained, keys.num_aug, seed),
            sudoku_split(where, size, *held_out, 0, seed),
        )
    except ConfigError as error:  # the builder has the same keys, as flags
        raise ConfigError(f"{where}.{error}") from None


def _members(split: PuzzleSplit, id_offset: int = 0, prefix: str = "") -> list[Member]:
    return [Member(split, name, id_offset, prefix) for name in split.sets]


def _open_train(key: str, paths: list[str]) -> list[tuple[PuzzleSplit, int]]:
    """Opens the training split of each dataset. Returns what is added to its ids, too."""
    opened: list[tuple[PuzzleSplit, int]] = []
    used = 0
    for path in paths:
        split = read_split(f"{key}={path}", Path(path), "train")
        opened.append((split, used))  # ids of datasets follow each other
        _check_seq_len(f"{key}={path}", split, opened[0][0])
        used += split.metadata.num_puzzle_identifiers
    return opened


def _open_test(
    key: str,
    paths: list[str],
    test_paths: list[str],
    train: list[tuple[PuzzleSplit, int]],
    eval_split: str,
) -> list[Member]:
    """Opens the folders to evaluate on. Each shares the ids of the same training folder, or else of
    the one at its place in the list.
    """
    key = "data_paths_test" if test_paths else key
    # a dataset may come without a test split, but what was held out is asked for
    optional = eval_split == "test"
    folders = test_paths or [
        path for path in paths if not optional or has_split(Path(path), eval_split)
    ]
    # prefixes tell sets of several datasets apart, also if only one of them has a test split
    prefixes = _prefixes(folders) if len(test_paths or paths) > 1 else [""] * len(folders)
    train_folders = [os.path.realpath(path) for path in paths]
    vocab_size = max(split.metadata.vocab_size for split, _ in train)
    members = []
    for index, (path, prefix) in enumerate(zip(folders, prefixes, strict=True)):
        where, folder = f"{key}={path}", os.path.realpath(path)
        split = read_split(where, Path(path), eval_split)
        _check_seq_len(where, split, train[0][0])
        # its puzzles have rows in the table of a training folder: the one with the same path
        owner = train_folders.index(folder) if folder in train_folders else index
        if owner >= len(train):
            raise ConfigError(
                f"{where}: has no training folder in its place; give as many data_paths as"
                " data_paths_test"
            )
        train_split, id_offset = train[owner]
        # an id or token that training does not have would have no embedding
        ids = split.metadata.num_puzzle_identifiers
        train_ids = train_split.metadata.num_puzzle_identifiers
        if ids > train_ids or split.metadata.vocab_size > vocab_size:
            raise ConfigError(
                f"{where}: has {ids} puzzle ids and vocab_size={split.metadata.vocab_size}, but the"
                f" training folder {train_ids} and {vocab_size}; build the two together"
            )
        members += _members(split, id_offset, prefix)
    return members


def _check_seq_len(where: str, split: PuzzleSplit, first: PuzzleSplit) -> None:
    if split.metadata.seq_len != first.metadata.seq_len:
        raise ConfigError(
            f"{where}: seq_len={split.metadata.seq_len}, but {first.where} has"
            f" {first.metadata.seq_len}; give only datasets of one seq_len"
        )


def _prefixes(paths: list[str]) -> list[str]:
    """Returns the folders' names, or the whole paths if two names are equal."""
    names = [os.path.basename(os.path.realpath(path)) for path in paths]
    return [f"{name}/" for name in (names if len(set(names)) == len(names) else paths)]
