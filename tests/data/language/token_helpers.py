"""Token files whose tokens say where they stand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from data.language.token_files import MAGIC
from data.language.tokens import TokenSource
from tests.making import make_source

VOCAB = 60_000


def write_bin(path: Path, tokens: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([MAGIC, 1, len(tokens)] + [0] * 253, "<i4")
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def write_npy(path: Path, tokens: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, tokens)


def write_corpus(folder: Path, train: int = 1000, val: int = 100, first: int = 0, **said) -> Path:
    """Two files for training and a held-out one; token n of the training files is first + n."""
    tokens = (np.arange(train) + first).astype(np.uint16)
    write_bin(folder / "train_0.bin", tokens[: train // 3])
    write_npy(folder / "train_1.npy", tokens[train // 3 :])
    write_bin(folder / "val_0.bin", np.arange(val).astype(np.uint16))
    (folder / "dataset.json").write_text(json.dumps({"vocab_size": VOCAB} | said))
    return folder


def source(folder: Path | None, **more) -> TokenSource:
    run = {"seed": 0, "shards": 2, "global_batch_size": 8, "epochs": 2, "seq_len": 8}
    return make_source("tokens", **run | {"data_path": folder and str(folder)} | more)
