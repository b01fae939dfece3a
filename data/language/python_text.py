"""The source of Python's standard library as bytes, with some packages held out: text that every
machine has.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

from data.language.token_files import Corpus
from data.tokenizer import Bytes
from utils.errors import ConfigError

# no source that somebody wrote by hand (encodings and pydoc_data are tables), or tests
WITHOUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
HELD_OUT = 20  # one package, or module outside packages, in this many: files of one share lines


def python_text(mebibytes: int) -> Corpus:
    """Reads files in the order of their names, each after a begin token: all that are held out, and
    up to `mebibytes` to train on.
    """
    folder, tokenizer = Path(sysconfig.get_paths()["stdlib"]), Bytes()
    pieces: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    digest, left = hashlib.sha256(), mebibytes << 20
    for name in _names(folder):
        try:
            text = (folder / name).read_bytes()
        except OSError:
            continue  # the fingerprint differs then
        package = name.split("/")[0]
        split = "train" if zlib.crc32(package.encode()) % HELD_OUT else "val"
        if split == "train":
            text = text[:left]
            left -= len(text)
        pieces[split] += [np.array([tokenizer.begin], np.uint16), np.frombuffer(text, np.uint8)]
        digest.update(f"{split} {len(text)} ".encode() + text)
    if not (pieces["train"] and pieces["val"]):
        raise ConfigError(
            f"data_path=null: {folder} holds no source of Python's standard library; give"
            " data_path=FOLDER with tokens"
        )
    return Corpus(
        where="data_path=null",
        files={
            split: [np.concatenate(parts).astype(np.uint16, copy=False)]
            for split, parts in pieces.items()
        },
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest.hexdigest(),
        begin=tokenizer.begin,
        tokenizer=tokenizer,
        token_bytes=tokenizer.token_bytes,
    )


def _names(folder: Path) -> list[str]:
    names = []
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in WITHOUT]  # does not descend into them
        inside = Path(above).relative_to(folder)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)
