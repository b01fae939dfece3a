"""Reads arrays from `.npy` files that may be damaged, loads datasets from the hub, and hashes a
dataset, by which a run recognises its data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import ConfigError, brief
from utils.files import open_plain

HASHED = 2 << 30  # bytes of a dataset that are hashed whole, in one or two seconds
SAMPLED, BLOCK = 1 << 10, 1 << 14  # of a larger one, about so many blocks of so many bytes


def open_array(path: Path, dimensions: int) -> np.ndarray:
    """Maps a file's array of whole numbers. Raises ValueError if it holds something else, OSError
    if it cannot be read.
    """
    open_plain(path).close()  # np.load would wait forever for a pipe
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except EOFError as error:
        raise ValueError(str(error)) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise ValueError("holds no whole numbers")
    if array.ndim != dimensions:
        raise ValueError(f"has shape {array.shape}")
    # `take` would copy the whole of an array of another layout, every time; and plain views are
    # quicker to slice than the subclass
    return np.require(array.view(np.ndarray), requirements=["C", "A"])


def content_hash(parts: Mapping[str, Path | np.ndarray]) -> str:
    """Hashes files or arrays with their names and sizes: all of their bytes up to HASHED, or blocks
    at even distances from the start of each. Raises OSError if a file cannot be read.
    """
    # a large dataset is sampled: hashing all of it would delay each start
    total = sum(
        part.stat().st_size if isinstance(part, Path) else part.nbytes for part in parts.values()
    )
    stride = BLOCK if total <= HASHED else total // SAMPLED
    digest = hashlib.sha256()
    for name, part in parts.items():
        # one file after another: a folder may hold more files than a process can have open
        array = _mapped(part) if isinstance(part, Path) else part
        # names and sizes, so that no bytes can move from one part to the next unseen
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode(errors="surrogateescape"))
        content = array.reshape(-1).view(np.uint8)
        for start in range(0, len(content), stride):
            digest.update(content[start : start + BLOCK].data)
    return digest.hexdigest()


def _mapped(path: Path) -> np.ndarray:
    with open_plain(path) as file:
        empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, np.uint8) if empty else np.memmap(file, np.uint8, "r")


def load_from_hub(where: str, remedy: str, name: str, split: str, **options: Any) -> Any:
    """Loads a dataset on the hub, or a folder that `datasets` can read. `where` and `remedy` begin
    and end the error if that fails.
    """
    from datasets import load_dataset

    if os.path.exists(f"{name}/state.json"):  # what save_to_disk writes of one split
        name, options = "arrow", options | {"data_files": {"train": f"{name}/*.arrow"}}
    try:
        return load_dataset(name, split=split, **options)
    except Exception as error:  # the remedy is the same for every error of the hub's client
        raise ConfigError(f"{where} cannot be loaded ({brief(error)}); {remedy}") from None
