"""Documents from files, folders or the hub, always in the same order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.language.text_files import Field, check_file, read_file, text_of
from utils.errors import ConfigError, brief

Document = tuple[str, int]  # its text, and its size in the input


def find_files(key: str, inputs: Sequence[str]) -> list[Path]:
    """Returns all files below the inputs, by name, without hidden ones."""
    paths = []
    for name in inputs:
        if os.path.isdir(name):
            for above, folders, files in os.walk(name):
                folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
                paths += [Path(above, file) for file in sorted(files) if not file.startswith(".")]
        elif os.path.exists(name):
            paths.append(Path(name))
        else:
            raise ConfigError(
                f"{key} {name}: no such file or folder; give text, .jsonl or .parquet files, or a"
                " folder of them"
            )
    if not paths:
        raise ConfigError(
            f"{key} {' '.join(inputs)}: holds no files; give text, .jsonl or .parquet files, or a"
            " folder of them"
        )
    for path in paths:
        check_file(f"{key} {path}", path)
    return paths


def read_files(paths: Sequence[Path], field: str) -> Iterator[Document]:
    """Yields documents: lines of .jsonl, rows of .parquet, and other files whole."""
    for path in paths:
        for _, text, size in read_file(f"--input {path}", path, Field(field, f"--field {field}")):
            if text:
                yield text, size


def read_hub(name: str, split: str, field: str) -> Iterator[Document]:
    """Yields the rows of a dataset on the hub, or of a folder that `datasets` reads."""
    from datasets import load_dataset

    try:
        for number, row in enumerate(load_dataset(name, split=split, streaming=True)):
            where = f"--hub {name}: row {number}"
            if text := text_of(where, row, Field(field, f"--field {field}")):
                yield text, len(text)
    except ConfigError:
        raise
    except Exception as error:  # whatever the hub's client raises, the user's way out is the same
        raise ConfigError(
            f"--hub {name}: split {split} cannot be loaded ({brief(error)}); download it and use"
            " --input"
        ) from None
