"""Reads documents from files: lines of .jsonl, rows of .parquet, and whole .txt files.

Reading can start at any file and row, so `data=stream` continues where it stopped.
`data.build.tokens` reads files by the same functions.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.files import content_hash, load_from_hub
from utils.errors import ConfigError, RankError, brief
from utils.files import open_plain

SUFFIXES = (".jsonl", ".parquet", ".txt")
ROWS_AT_ONCE = 1024  # rows of Parquet read at once

ALL = range(sys.maxsize)  # rows of a file, however many it has

# a row's number, text and size in bytes; after the last row, the number of rows and None
Row = tuple[int, str | None, int]


class TextFiles:
    """The files in a folder that hold text, all of one kind, in the order of their names."""

    def __init__(self, data_path: str, field: str) -> None:
        self.where = f"data_path={data_path}"
        self._field, self._folder = field, Path(data_path)
        self._paths = _find(self.where, self._folder)

    def __len__(self) -> int:
        return len(self._paths)

    def fingerprint(self) -> str:
        named = {path.relative_to(self._folder).as_posix(): path for path in self._paths}
        try:
            return content_hash(named)
        except OSError as error:
            raise _unreadable(self.where, error) from None

    def rows(self, file: int, wanted: range) -> Iterator[Row]:
        path = self._paths[file]
        return read_file(f"data_path={path}", path, self._field, wanted)


class HubTexts:
    """The files of a dataset on the hub, or of a folder that `datasets` can read."""

    def __init__(self, key: str, name: str, split: str, field: str) -> None:
        self.where, self._field = f"{key}{name}", field
        where, remedy = f"{self.where}: split {split}", "correct it, or download the files"
        self._dataset = load_from_hub(where, remedy, name, split, streaming=True)

    def __len__(self) -> int:
        return self._dataset.num_shards

    def fingerprint(self) -> str:
        """The number of files, as their content is unknown until it is read."""
        return str(len(self))

    def rows(self, file: int, wanted: range) -> Iterator[Row]:
        rows = 0
        try:
            for row, content in enumerate(self._dataset.shard(len(self), file)):
                rows = row + 1
                if row in wanted:
                    text = text_of(f"{self.where}: row {rows}", content, self._field)
                    yield row, text, len(text)
        except ConfigError:
            raise
        except Exception as error:
            raise RankError(
                f"{self.where}: cannot be read any further ({brief(error)}); start again to"
                " continue from the last checkpoint"
            ) from None
        yield rows, None, 0


class Documents:
    """Iterates over the documents of one shard, and knows the position after the last one.

    Each shard owns equally many whole files. Files that are left over, fewer than there are shards,
    follow: of these a shard owns every `shards`-th row, counted over all of them.
    """

    def __init__(
        self,
        texts: TextFiles | HubTexts,
        shard: int = 0,
        shards: int = 1,
        file: int = 0,
        row: int | None = None,
    ) -> None:
        self._texts, self._shard, self._shards = texts, shard, shards
        left_over = len(texts) - len(texts) % shards
        self._files = [*range(shard, left_over, shards), *range(left_over, len(texts))]
        self._whole = left_over // shards  # so many files are the shard's alone
        self.file = file  # among those that the shard reads
        # the next one; it may be beyond the file's end
        self.row = self._first(file) if row is None else row

    def _first(self, file: int) -> int:
        return 0 if file < self._whole else self._shard

    @property
    def position(self) -> tuple[int, int]:
        return self.file, self.row

    def __iter__(self) -> Iterator[str]:
        while self.file < len(self._files):
            rows = 0  # of the file
            step = 1 if self.file < self._whole else self._shards
            wanted = range(self.row, sys.maxsize, step)
            for row, text, _ in self._texts.rows(self._files[self.file], wanted):
                if text is None:
                    rows = row
                    break
                self.row = row + step
                yield text
            self.file += 1
            # rows are counted over all shared files: in the next one the shard is as far from the
            # start
            shared = self.file > self._whole
            self.row = self.row - rows if shared else self._first(self.file)


def read_file(where: str, path: Path, field: str, wanted: range = ALL) -> Iterator[Row]:
    # the ending decides; whatever is neither JSON lines nor Parquet is one document
    kind = path.suffix.lower()
    if kind == ".arrow":
        raise ConfigError(f"{where}: is not text; read what save_to_disk wrote with --hub FOLDER")
    try:
        if kind == ".jsonl":
            yield from _lines(where, path, field, wanted)
        elif kind == ".parquet":
            yield from _parquet_rows(where, path, field, wanted)
        else:
            with open_plain(path) as file:
                if 0 in wanted:
                    text = file.readall().decode()
                    yield 0, text.replace("\r\n", "\n").replace("\r", "\n"), file.tell()
            yield 1, None, 0
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(where, error) from None


def _lines(where: str, path: Path, field: str, wanted: range) -> Iterator[Row]:
    row = 0
    open_plain(path).close()
    # line by line, as files may be larger than memory
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            if row in wanted:  # others are not parsed
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"{where}: line {number} is not JSON ({brief(error)}); correct or remove it"
                    ) from None
                yield row, text_of(f"{where}: line {number}", content, field), len(line)
            row += 1
    yield row, None, 0


def _parquet_rows(where: str, path: Path, field: str, wanted: range) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with open_plain(path) as opened, ParquetFile(opened) as file:
            if field not in file.schema_arrow.names:
                raise _lacking(where, field, file.schema_arrow.names)
            # groups of rows before the first one that is wanted are not read
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            row = skipped = 0
            while skipped < len(groups) and row + groups[skipped] <= wanted.start:
                row, skipped = row + groups[skipped], skipped + 1
            left = range(skipped, len(groups))
            # from there on all rows are read, but only those wanted are yielded
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=left, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if row in wanted:
                        text = text_of(f"{where}: row {row + 1}", {field: text}, field)
                        yield row, text, len(text)
                    row += 1
    except ArrowException as error:
        raise ConfigError(
            f"{where}: cannot be read as Parquet ({brief(error)}); copy it again or remove it"
        ) from None
    yield row, None, 0


def place_of(text: str) -> float:
    """Returns a number from 0 to 1 that depends on the document's content alone."""
    return zlib.crc32(text.encode(errors="surrogatepass")) / (1 << 32)


def is_held_out(text: str, share: float) -> bool:
    """Decides by a document's content, so that it is on one side only."""
    return place_of(text) < share


def text_of(where: str, row: Any, field: str) -> str:
    """Returns the text in a row; null is an empty text."""
    if not isinstance(row, dict) or field not in row:
        raise _lacking(where, field, row)
    if row[field] is not None and not isinstance(row[field], str):
        kind = type(row[field]).__name__
        raise ConfigError(
            f"{where}: {field} is {kind}, not text; correct it, or name another field"
        )
    return row[field] or ""


def _find(where: str, path: Path) -> list[Path]:
    if not os.path.exists(path):
        raise ConfigError(f"{where}: no such file or folder; give {_expected()}")
    entries = sorted(path.rglob("*")) if os.path.isdir(path) else [path]
    paths = [path for path in entries if path.suffix in SUFFIXES and not os.path.isdir(path)]
    if len({path.suffix for path in paths}) != 1:
        what = "files of several kinds" if paths else "holds no texts"
        raise ConfigError(f"{where}: {what}; give {_expected()}")
    return paths


def _expected() -> str:
    return (
        f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} files of one kind, or a folder of them; what"
        " save_to_disk wrote is read as data.hub=FOLDER"
    )


def _unreadable(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{where}: cannot be read as UTF-8 text ({brief(error)}); correct it, or leave it out"
    )


def _lacking(where: str, field: str, row: Any) -> ConfigError:
    there = brief(", ".join(map(str, row))) if isinstance(row, dict | list) else "no fields"
    return ConfigError(f"{where}: has {there}, not {field}; name the field that holds the text")
