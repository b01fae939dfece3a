"""Joins puzzle datasets into one: numbers rows, puzzles and groups consecutively, and keeps puzzle
ids apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contract import IGNORE
from data.recursive.puzzle_files import PuzzleSplit, check_values, has_split, read_split
from data.recursive.sudoku import generate, sudoku_split
from utils.errors import ConfigError


@dataclass(frozen=True)
class Member:
    """One dataset's split, with its offset and prefix in the pool."""

    split: PuzzleSplit
    id_offset: int = 0  # added to its puzzle ids
    prefix: str = ""  # put before the names of its sets


class PuzzleRows:
    """The examples of several sets as one table."""

    def __init__(self, sets: list[tuple[PuzzleSplit, str]]) -> None:
        self._sets = sets
        self._ends = np.cumsum([len(split.sets[name].inputs) for split, name in sets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels of these rows. Labels to ignore become IGNORE."""
        if len(self._sets) == 1:
            return self._read_set(0, rows)
        inputs, labels = np.empty((2, len(rows), self._sets[0][0].metadata.seq_len), np.int32)
        owner = np.searchsorted(self._ends, rows, side="right")
        for which in np.unique(owner):  # sets, not puzzles: there are few
            mine = owner == which
            inputs[mine], labels[mine] = self._read_set(
                which, rows[mine] - (self._ends[which - 1] if which else 0)
            )
        return inputs, labels

    def _read_set(self, which: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        split, name = self._sets[which]
        inputs = split.sets[name].inputs.take(rows, axis=0)
        raw = split.sets[name].labels.take(rows, axis=0)
        vocab_size, ignored = split.metadata.vocab_size, split.metadata.ignored
        # a token without an embedding would end in a device fault
        check_values(f"{split.where}/{name}__inputs.npy", inputs, vocab_size)
        check_values(f"{split.where}/{name}__labels.npy", raw, vocab_size, ignored)
        labels = raw.astype(np.int32)
        if ignored != IGNORE:
            np.putmask(labels, raw == ignored, IGNORE)
        return inputs.astype(np.int32), labels


class Pool:
    """The groups and puzzles of several sets, with consecutive numbers."""

    def __init__(self, members: list[Member]) -> None:
        sets = [one for member in members for one in member.split.sets.values()]
        id_offsets = [member.id_offset for member in members for _ in member.split.sets]
        rows = np.cumsum([0, *(len(one.inputs) for one in sets)])
        puzzles = np.cumsum([0, *(len(one.puzzle_identifiers) for one in sets)])
        self.first = np.concatenate(
            [
                one.puzzle_indices[:-1].astype(np.int64) + row
                for one, row in zip(sets, rows, strict=False)
            ]
        )
        self.size = np.concatenate([np.diff(one.puzzle_indices).astype(np.int64) for one in sets])
        ids = [
            one.puzzle_identifiers.astype(np.int64) + offset
            for one, offset in zip(sets, id_offsets, strict=True)
        ]
        self.identifier = np.concatenate(ids).astype(np.int32)
        self.group_first = np.concatenate(
            [
                one.group_indices[:-1].astype(np.int64) + p
                for one, p in zip(sets, puzzles, strict=False)
            ]
        )
        self.group_size = np.concatenate(
            [np.diff(one.group_indices).astype(np.int64) for one in sets]
        )
        if not len(self.group_first):
            raise ConfigError(
                "data_path: the training sets hold no puzzles; build the dataset again"
            )


def open_datasets(
    data_path: str | None,
    data_paths: Sequence[str] | None,
    data_paths_test: Sequence[str] | None,
    embedded: Mapping[str, Any] | None,
) -> tuple[list[Member], list[Member]]:
    """Opens the training and test splits that the user's keys name, or the embedded Sudoku."""
    if data_path is not None and data_paths:
        raise ConfigError(
            f"data_path={data_path} and data_paths={list(data_paths)} are both given; keep one of"
            " them"
        )
    key = "data_path" if data_path is not None else "data_paths"
    if paths := [data_path] if data_path is not None else list(data_paths or []):
        train = _open_train(key, paths)
        return train, _open_test(key, paths, list(data_paths_test or []), train)
    if data_paths_test:
        raise ConfigError(
            f"data_paths_test={list(data_paths_test)} needs training data; give data_paths as well"
        )
    if not embedded:
        raise ConfigError("data_path=null: there is no dataset to train on; give data_path=FOLDER")
    splits = embedded_sudoku(**embedded)
    return [Member(splits[0])], [Member(splits[1])]


def embedded_sudoku(
    *, size: int, train: int, test: int, blanks: int, num_aug: int = 0, seed: int = 0
) -> tuple[PuzzleSplit, PuzzleSplit]:
    """Generates boards (2,000 of size 6 in a fifth of a second). Only training boards are
    augmented.
    """
    where = "data.embedded"
    try:
        trained, held_out = generate(size, (train, test), blanks, seed)
        return (
            sudoku_split(where, size, *trained, num_aug, seed),
            sudoku_split(where, size, *held_out, 0, seed),
        )
    except ConfigError as error:  # the builder has the same keys, as flags
        raise ConfigError(f"{where}.{error}") from None


def _open_train(key: str, paths: list[str]) -> list[Member]:
    members: list[Member] = []
    used = 0
    for path in paths:
        split = read_split(f"{key}={path}", Path(path), "train")
        members.append(Member(split, used))
        _check_seq_len(f"{key}={path}", split, members)
        used += split.metadata.num_puzzle_identifiers
    return members


def _open_test(
    key: str, paths: list[str], test_paths: list[str], train: list[Member]
) -> list[Member]:
    """Opens test folders. Each shares the ids of the same training folder, or else of the one at
    its place in the list.
    """
    given = bool(test_paths)
    key = "data_paths_test" if given else key
    found = test_paths if given else [path for path in paths if has_split(Path(path), "test")]
    prefixes = _prefixes(found) if len(test_paths or paths) > 1 else [""] * len(found)
    real = [os.path.realpath(path) for path in paths]
    members = []
    for index, (path, prefix) in enumerate(zip(found, prefixes, strict=True)):
        named = f"{key}={path}"
        split = read_split(named, Path(path), "test")
        _check_seq_len(named, split, train)
        owner = real.index(os.path.realpath(path)) if os.path.realpath(path) in real else index
        if owner >= len(train):
            raise ConfigError(
                f"{named}: has no training folder in its place; give as many data_paths as"
                " data_paths_test"
            )
        known, ids = train[owner].split.metadata, split.metadata
        if ids.num_puzzle_identifiers > known.num_puzzle_identifiers or ids.vocab_size > max_vocab(
            train
        ):
            raise ConfigError(
                f"{named}: has {ids.num_puzzle_identifiers} puzzle ids and"
                f" vocab_size={ids.vocab_size}, but the training folder"
                f" {known.num_puzzle_identifiers} and {max_vocab(train)}; build the two together"
            )
        members.append(Member(split, train[owner].id_offset, prefix))
    return members


def max_vocab(members: list[Member]) -> int:
    return max(member.split.metadata.vocab_size for member in members)


def _check_seq_len(named: str, split: PuzzleSplit, train: list[Member]) -> None:
    expected = train[0].split.metadata.seq_len
    if split.metadata.seq_len != expected:
        first = f"{train[0].split.where} has {expected}"
        raise ConfigError(
            f"{named}: seq_len={split.metadata.seq_len}, but {first}; give only datasets of one"
            " seq_len"
        )


def _prefixes(paths: list[str]) -> list[str]:
    """Returns the folders' names, or the whole paths if two names are equal."""
    names = [os.path.basename(os.path.realpath(path)) for path in paths]
    return [f"{name}/" for name in (names if len(set(names)) == len(names) else paths)]
