"""The source of Python's standard library as bytes or byte pairs, with some packages held out: text
that every machine has.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

from data.language.token_files import Corpus
from data.tokenizer import Bytes, FromFile, Tokenizer, train_bpe
from utils.errors import ConfigError

# not written by hand (encodings and pydoc_data are tables), or tests
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


def python_text(mebibytes: int, bpe: int | None = None) -> Corpus:
    """Reads files in the order of their names, each after a begin token: all that are held out, and
    up to `mebibytes` to train on.

    `bpe` is the size of a vocabulary of byte pairs, which are found in the texts to train on.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[bytes]] = {"train": [], "val": []}
    # whole packages are held out, as files of one package share lines
    digest, left = hashlib.sha256(), mebibytes << 20
    for name in _names(folder):
        try:
            text = (folder / name).read_bytes()
        except OSError:
            continue  # the fingerprint differs then
        package = name.split("/")[0]
        split = "train" if zlib.crc32(package.encode()) % HELD_OUT else "val"
        # training stops at its size, but files that are held out are read to the end
        if split == "train":
            text = text[:left]
            left -= len(text)
        texts[split].append(text)
        digest.update(f"{split} {len(text)} ".encode() + text)
    if not (texts["train"] and texts["val"]):
        raise ConfigError(
            f"data_path=null: {folder} holds no source of Python's standard library; give"
            " data_path=FOLDER with tokens"
        )
    # pairs are learned from the training text alone
    tokenizer: Tokenizer = Bytes()
    if bpe is not None:
        pairs = train_bpe((_as_text(text) for text in texts["train"]), bpe, mebibytes << 20)
        tokenizer = FromFile("data.embedded.bpe", "its vocabulary", content=pairs.encode())
    return Corpus(
        where="data_path=null",
        files={split: [_joined(tokenizer, parts)] for split, parts in texts.items()},
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest.hexdigest() + ("" if bpe is None else f" bpe {bpe}"),
        begin=tokenizer.begin,
        tokenizer=tokenizer,
        token_bytes=tokenizer.token_bytes,
    )


def _joined(tokenizer: Tokenizer, texts: list[bytes]) -> np.ndarray:
    """Returns the tokens of all texts, each after a begin token."""
    if isinstance(tokenizer, Bytes):
        tokens = [np.frombuffer(text, np.uint8) for text in texts]
    else:
        tokens = tokenizer.encode([_as_text(text) for text in texts])
    begin = np.array([tokenizer.begin])
    return np.concatenate([piece for ids in tokens for piece in (begin, ids)]).astype(np.uint16)


def _as_text(text: bytes) -> str:
    return text.decode(errors="replace")


def _names(folder: Path) -> list[str]:
    names = []
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in WITHOUT]  # does not descend into them
        inside = Path(above).relative_to(folder)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)
