"""Token shards on disk: `.npy` arrays, and `.bin` files as llm.c and modded-nanogpt write them.

A `.bin` begins with 256 int32: the magic number 20240520, version 1, the number of tokens, which
are uint16. All numbers are little-endian.

Files for training have `train` in their name and held-out ones `val`, or they lie in folders of
those names. A `dataset.json` beside them may say more, and is checked: `vocab_size`,
`tokenizer` ("bytes" or a file), `begin_token`, `token_bytes` (of each id), `files` (tokens in
each).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from data.files import content_hash, open_array
from data.tokenizer import LARGEST_VOCABULARY, Tokenizer, open_tokenizer
from utils.errors import ConfigError, brief
from utils.files import open_plain, read_json

MAGIC, HEADER = 20240520, 1024
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Corpus:
    """The tokens of one corpus, and what is known about them."""

    where: str  # how messages name it: the user's key=value
    files: Mapping[str, list[np.ndarray]]  # of each split
    vocab_size: int
    fingerprint: str
    begin: int | None = None  # the id before each document
    tokenizer: Tokenizer | None = None
    token_bytes: tuple[int, ...] = ()
    names: Mapping[str, list[str]] = field(default_factory=dict)  # of the files, in messages

    def check(self, split: str, file: int, start: int, tokens: np.ndarray) -> None:
        """Raises ConfigError if one of these tokens, read from position `start` on, is not in the
        vocabulary.
        """
        wrong = np.flatnonzero(tokens.view(np.uint32) >= self.vocab_size)
        if len(wrong):
            name = self.names[split][file] if self.names else split
            token = tokens.view(np.uint32)[wrong[0]]
            raise ConfigError(
                f"{self.where}: {name} holds token {token} at position {start + wrong[0]}, but"
                f" vocab_size={self.vocab_size}; build or copy the file again, or give the right"
                " vocabulary"
            )


def open_corpus(
    key: str, folder: Path, vocab_size: int | None = None, begin: int | None = None
) -> Corpus:
    """Opens all files of a folder, memory-mapped. `begin` takes precedence over dataset.json, and
    of two vocabulary sizes the larger one counts.
    """
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{key}: no such folder; build one with python -m data.build.tokens --output-dir"
            f" {folder}"
        )
    # the folder's dataset.json, and the files in it
    described = _describe(key, folder / "dataset.json")
    paths = _find(key, folder)
    size = vocab_size
    if described.vocab_size is not None:
        size = max(vocab_size or 0, described.vocab_size)
    # without a size, a wrong token could not be told from a rare one
    if size is None:
        raise ConfigError(
            f"{key}: no dataset.json there says how many token ids there are; add data.vocab_size,"
            " 50257 for GPT-2's"
        )
    files = {
        split: {name: _open(key, path, name, described.files) for name, path in named.items()}
        for split, named in paths.items()
    }
    arrays = files["train"] | files["val"]
    if lost := sorted(described.files.keys() - arrays.keys()):
        raise ConfigError(
            f"{key}: dataset.json lists {brief(lost[0])}, which is not there; copy it again"
        )
    # the user's keys count more: dataset.json may come from elsewhere
    begin = described.begin_token if begin is None else begin
    if begin is not None and begin >= size:
        raise ConfigError(f"{key}: begin_token={begin} is not below vocab_size={size}; correct it")
    # ids beyond those that dataset.json describes have no text
    token_bytes = described.token_bytes
    if token_bytes:
        token_bytes = (*token_bytes, *[0] * (size - len(token_bytes)))
    return Corpus(
        key,
        {split: [*named.values()] for split, named in files.items()},
        size,
        content_hash(arrays),
        begin,
        open_tokenizer(key, described.tokenizer, folder) if described.tokenizer else None,
        token_bytes,
        {split: [*named] for split, named in files.items()},
    )


def _find(key: str, folder: Path) -> dict[str, dict[str, Path]]:
    """Returns the files of each split by their names, in this order."""
    paths: dict[str, dict[str, Path]] = {split: {} for split in SPLITS}

    def add(split: str, path: Path) -> None:
        paths[split][path.relative_to(folder).as_posix()] = path

    # a file's name contains the split, or its folder is named so
    for path in _token_files(folder):
        named = [split for split in SPLITS if split in path.stem]
        if len(named) != 1:
            raise ConfigError(
                f"{key}: {brief(path.name)} has neither train nor val in its name, or both; rename"
                " it, or use folders"
            )
        add(named[0], path)
    for split in SPLITS:
        if (folder / split).is_dir():
            for path in _token_files(folder / split):
                add(split, path)
    # held-out files may be missing, as an evaluation is optional; training cannot go without
    if not paths["train"]:
        raise ConfigError(
            f"{key}: no .npy or .bin file for training there; build them with python -m"
            f" data.build.tokens --output-dir {folder}"
        )
    return paths


def _token_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".npy", ".bin"))


def _open(key: str, path: Path, name: str, listed: Mapping[str, int]) -> np.ndarray:
    """Opens one file, memory-mapped."""
    try:
        array = open_array(path, 1) if path.suffix == ".npy" else _open_bin(path)
        if array.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"holds {array.dtype}, not uint16 or uint32")
        if (count := listed.get(name, len(array))) != len(array):
            raise ValueError(f"holds {len(array):,} tokens, but dataset.json says {count:,}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {name} {brief(error)}; build or copy it again") from None
    return array


def _open_bin(path: Path) -> np.ndarray:
    with open_plain(path) as file:
        size, content = os.fstat(file.fileno()).st_size, file.read(HEADER)
        # the header must agree with the file's size, or the file was cut off
        numbers = np.frombuffer(content[:12].ljust(12, b"\0"), "<i4").tolist()
        if numbers[:2] != [MAGIC, 1] or size != HEADER + 2 * numbers[2]:
            raise ValueError(
                f"has {size} bytes and begins with {numbers}, not with {MAGIC}, 1 and the number of"
                " tokens"
            )
        if size == HEADER:
            return np.empty(0, np.uint16)
        return np.memmap(file, np.uint16, "r", HEADER).view(np.ndarray)


@dataclass(frozen=True)
class _Description:
    """The contents of dataset.json."""

    vocab_size: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)] | None = None
    # "bytes", or the name of a file beside it
    tokenizer: Annotated[str, Field(pattern=r"^[^/]{1,200}$")] | None = None
    begin_token: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] | None = None
    token_bytes: tuple[Annotated[int, Field(ge=0, le=1 << 20)], ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)


DESCRIPTION = TypeAdapter(_Description)


def _describe(key: str, path: Path) -> _Description:
    if not os.path.lexists(path):
        return _Description()
    where, remedy = f"{key}: dataset.json", "correct it, or build the dataset again"
    described = read_json(path, DESCRIPTION, remedy, where)
    count, size = len(described.token_bytes), described.vocab_size
    if count and count != size:
        what = f"has token_bytes of {count} ids, but vocab_size={size}"
        raise ConfigError(what, value=where, remedy=remedy)
    return described
