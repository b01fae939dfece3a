"""Documents from files, folders or the hub, always in the same order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ConfigError, brief

Document = tuple[str, int]  # its text, and how much of the input it took


def find_files(key: str, inputs: Sequence[str]) -> list[Path]:
    """All files below the inputs, by name; what begins with a dot is left out."""
    found = []
    for name in inputs:
        if os.path.isfile(name):
            found.append(Path(name))
        elif os.path.isdir(name):
            for above, folders, files in os.walk(name):
                folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
                found += [Path(above, file) for file in sorted(files) if not file.startswith(".")]
        else:
            raise ConfigError(f"{key} {name}: no such file or folder; give text, .jsonl or .parquet files, or a folder of them")
    if not found:
        raise ConfigError(f"{key} {' '.join(inputs)}: holds no files; give text, .jsonl or .parquet files, or a folder of them")
    return found


def read_files(paths: Sequence[Path], field: str) -> Iterator[Document]:
    """A line of .jsonl, a row of .parquet, and all of any other file is a document."""
    for path in paths:
        kind = path.suffix.lower()
        try:
            if kind == ".jsonl":
                yield from _lines(path, field)
            elif kind == ".parquet":
                yield from _rows(path, field)
            elif text := path.read_text(encoding="utf-8"):
                yield text, path.stat().st_size
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--input {path}: cannot be read as UTF-8 text ({brief(error)}); correct it, or leave it out") from None


def read_hub(name: str, split: str, field: str) -> Iterator[Document]:
    """The rows of a dataset on the hub, or of what `datasets` can read, as they come."""
    from datasets import load_dataset

    try:
        for number, row in enumerate(load_dataset(name, split=split, streaming=True)):
            if text := _checked(f"--hub {name}: row {number}", row, field):
                yield text, len(text)
    except ConfigError:
        raise
    except Exception as error:  # whatever the hub's client raises, the user's way out is the same
        raise ConfigError(f"--hub {name}: split {split} cannot be loaded ({brief(error)}); download it and use --input") from None


def _lines(path: Path, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--input {path}: line {number} is no JSON ({brief(error)}); correct or remove it") from None
            if text := _checked(f"--input {path}: line {number}", row, field):
                yield text, len(line)


def _rows(path: Path, field: str) -> Iterator[Document]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise _lacking(f"--input {path}", field, file.schema_arrow.names)
            for batch in file.iter_batches(1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text := _checked(f"--input {path}", {field: text}, field):
                        yield text, len(text)
    except ArrowException as error:
        raise ConfigError(f"--input {path}: is no Parquet file ({brief(error)}); build it again, or leave it out") from None


def _checked(where: str, row: Any, field: str) -> str:
    if not isinstance(row, dict) or field not in row:
        raise _lacking(where, field, list(row) if isinstance(row, dict) else [])
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{where}: {field} is a {type(text).__name__}, not text; give another --field")
    return text or ""


def _lacking(where: str, field: str, names: Sequence[str]) -> ConfigError:
    there = f"; there are {brief(', '.join(map(str, names)))}" if names else ""
    return ConfigError(f"{where}: has no field {field}{there}; name the one that holds the text with --field")
