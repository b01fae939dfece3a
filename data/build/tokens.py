"""Build token shards for data=tokens from text: files, folders, .jsonl, .parquet, or a dataset on
the hub.

python -m data.build.tokens --input TEXT_FILE_OR_FOLDER --tokenizer bytes --output-dir data/mine
python -m data.build.tokens --input FOLDER_OF_JSONL --field text --train-bpe 8192 \
    --output-dir data/mine
python -m data.build.tokens --hub HuggingFaceFW/fineweb-edu \
    --tokenizer tokenizer.json --output-dir data/fineweb

The same input gives the same bytes. Killed, and started again with the same line, it goes on where
it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data.build.common import Parser, whole
from data.build.workers import in_order, progress
from data.language.text_files import Documents, HubTexts, read_file
from data.language.token_files import bin_header
from data.tokenizer import Bytes, FromFile, Tokenizer, check_encodes, train_bpe
from utils.errors import ConfigError, RankError, brief, exit_status
from utils.files import write_whole

PART = 32 << 20  # bytes of text whose tokens make one file
# characters tokenized together: what the library keeps of them is many times as large
TOGETHER = 1 << 20
SPLITS = ("train", "val")

Document = tuple[str, int]  # its text, and its size in the input
Part = list[tuple[str, str]]  # split and text of each document


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
    return paths


def read_files(paths: Sequence[Path], field: str) -> Iterator[Document]:
    """Yields documents: lines of .jsonl, rows of .parquet, and other files whole."""
    for path in paths:
        for _, text, size in read_file(f"--input {path}", path, field):
            if text:
                yield text, size


def split_documents(
    documents: Iterator[Document], share: float, single: bool
) -> Iterator[tuple[str, str, int]]:
    """Yields each document's split, which its content decides, its text and its size. The end of a
    single document is held out.
    """
    for text, size in documents:
        if single:
            cut = int(len(text) * (1 - share))
            yield "train", text[:cut], size
            yield "val", text[cut:], 0
        else:
            yield (
                (
                    "val"
                    if zlib.crc32(text.encode(errors="surrogatepass")) < share * (1 << 32)
                    else "train"
                ),
                text,
                size,
            )


def parts_of(documents: Iterator[tuple[str, str, int]]) -> Iterator[tuple[Part, int]]:
    """Yields documents in parts of about one size, with their sizes. Only lengths decide where
    parts end, so they are always the same.
    """
    part: Part = []
    held = taken = 0
    for split, text, size in documents:
        part.append((split, text))
        held, taken = held + len(text), taken + size
        if held >= PART:
            yield part, taken
            part, held, taken = [], 0, 0
    if part:
        yield part, taken


def encode_part(number: int, part: Part, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes a part's tokens, and then a note on them. A part without its note is made again."""
    sizes, dtype = (
        np.array(tokenizer.token_bytes),
        np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32),
    )
    begin = [] if tokenizer.begin is None else [np.array([tokenizer.begin], dtype)]
    note: dict[str, Any] = {"files": {}, "sha256": {}, "bytes": 0, "stood_for": 0}
    for split in SPLITS:
        texts = [text for its, text in part if its == split and text]
        arrays: list[np.ndarray] = []
        for batch in batches_of(texts):
            for ids in tokenizer.encode(batch):
                if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
                    raise ConfigError(
                        f"--tokenizer: makes token {ids.max()}, but its vocabulary has"
                        f" {tokenizer.vocab_size}; repair it"
                    )
                note["stood_for"] += int(sizes[ids].sum())
                arrays += [*begin, ids.astype(dtype)]
        note["bytes"] += sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if arrays:
            tokens, name = np.concatenate(arrays), f"{split}_{number:06}.bin"
            content = bin_header(len(tokens), dtype) + tokens.tobytes()
            write_whole(folder / name, content)
            note["files"][name], note["sha256"][name] = (
                len(tokens),
                hashlib.sha256(content).hexdigest(),
            )
    write_whole(folder / f"part_{number:06}.json", json.dumps(note))
    return note


def batches_of(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields batches of at least TOGETHER characters."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= TOGETHER:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _work(
    number: int, part: Part | None, folder: str, name: str, begin: str | None
) -> dict[str, Any]:
    """Returns a part's note; without a part, the note of an earlier start."""
    if part is None:
        return json.loads(Path(folder, f"part_{number:06}.json").read_text())
    return encode_part(number, part, Path(folder), _tokenizer(name, Path(folder), begin))


@cache
def _tokenizer(name: str, folder: Path, begin: str | None) -> Tokenizer:
    return (
        Bytes()
        if name == "bytes"
        else FromFile(f"--tokenizer {name}", folder / "tokenizer.json", begin)
    )


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a line about it."""
    folder = Path(options.output_dir)
    _check(options, folder)
    paths = find_files("--input", options.input) if options.input else []
    aside = folder.with_name(f"{folder.name}.building")
    inputs = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    settings = json.dumps(
        [
            inputs,
            {
                name: value
                for name, value in vars(options).items()
                if name not in ("output_dir", "workers")
            },
            PART,
        ]
    )
    single = len(paths) == 1 and paths[0].suffix.lower() not in (".jsonl", ".parquet")

    def documents() -> Iterator[tuple[str, str, int]]:
        if paths:
            read = read_files(paths, options.field)
        else:
            texts = Documents(HubTexts("--hub ", options.hub, options.split, options.field))
            read = ((text, len(text)) for text in texts if text)
        return split_documents(read, options.val_share, single)

    try:
        if (
            not (aside / "settings.json").is_file()
            or (aside / "settings.json").read_text() != settings
        ):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_whole(aside / "settings.json", settings)
        name = _place_tokenizer(options, aside, documents)
        tokenizer = _tokenizer(name, aside, options.begin_token)
        if options.tokenizer:
            texts = (text for _, text, _ in documents())
            check_encodes(f"--tokenizer {options.tokenizer}", tokenizer, texts)
        notes = _encode_all(
            options, aside, name, parts_of(documents()), sum(path.stat().st_size for path in paths)
        )
        description = _describe(notes, tokenizer, options)
        write_whole(aside / "dataset.json", json.dumps(description) + "\n")
        for left in aside.iterdir():  # notes, and what a start that was killed has half written
            if left.name not in (*description["files"], "dataset.json", "tokenizer.json"):
                left.unlink()
        _put_in_place(aside, folder)
    except OSError as error:
        raise ConfigError(
            f"--output-dir {folder}: cannot be written ({brief(error)}); choose another folder"
        ) from None
    tokens = {
        split: sum(count for file, count in description["files"].items() if file.startswith(split))
        for split in SPLITS
    }
    exact = (
        ""
        if description["token_bytes"]
        else "; this tokenizer changes the text, so there will be no bits per byte"
    )
    return (
        f"{folder}: {tokens['train']:,} tokens for training, {tokens['val']:,} held out,"
        f" {description['bytes_per_token']:.3f} bytes per token,"
        f" vocabulary {description['vocab_size']:,}{exact}"
    )


def _check(options: argparse.Namespace, folder: Path) -> None:
    """Raises ConfigError for options that are wrong, before the work starts."""
    if os.path.exists(folder) and not folder.is_dir():
        raise ConfigError(f"--output-dir {folder}: it is a file; choose another folder")
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not ((folder / "dataset.json").is_file() and any(folder.glob("train_*.bin")))
    ):
        raise ConfigError(
            f"--output-dir {folder}: exists and is not a dataset of tokens; choose another folder"
            " or empty this one"
        )
    if not 0 <= options.val_share < 1:
        raise ConfigError(
            f"--val-share {options.val_share}: must be at least 0 and less than 1, for example 0.01"
        )
    if options.tokenizer not in (None, "bytes") and not os.path.isfile(options.tokenizer):
        raise ConfigError(
            f"--tokenizer {options.tokenizer}: no such file; give bytes, a tokenizer.json, or"
            " --train-bpe N instead"
        )


def _place_tokenizer(options: argparse.Namespace, aside: Path, documents: Any) -> str:
    """Copies the tokenizer's file beside the shards, or trains one once. Bytes need none."""
    if options.tokenizer == "bytes":
        return "bytes"
    if not (aside / "tokenizer.json").is_file():
        if options.tokenizer:
            content = FromFile(
                f"--tokenizer {options.tokenizer}", Path(options.tokenizer), options.begin_token
            ).content
        else:
            texts = (text for split, text, _ in documents() if split == "train")
            content = train_bpe(texts, options.train_bpe, options.bpe_mib << 20).encode()
        write_whole(aside / "tokenizer.json", content)
    return "tokenizer.json"


def _encode_all(
    options: argparse.Namespace,
    aside: Path,
    name: str,
    parts: Iterator[tuple[Part, int]],
    total: int,
) -> list[dict[str, Any]]:
    """Returns all parts' notes, in order. Parts of an earlier start are not made again."""

    def tasks() -> Iterator[tuple[Any, ...]]:
        for number, (part, size) in enumerate(parts):
            made = (aside / f"part_{number:06}.json").is_file()
            yield number, None if made else part, str(aside), name, options.begin_token
            bar.update(size)

    with progress(total or None, "B", scale=True) as bar:
        return list(in_order(_work, tasks(), options.workers))


def _describe(
    notes: list[dict[str, Any]], tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns the contents of dataset.json."""
    files = {file: count for note in notes for file, count in note["files"].items()}
    if not any(file.startswith("train") for file in files):
        where = options.hub or " ".join(options.input)
        raise ConfigError(
            f"{where}: no text is left for training; give more, or a smaller --val-share than"
            f" {options.val_share}"
        )
    size = sum(note["bytes"] for note in notes)
    exact = size == sum(note["stood_for"] for note in notes)
    digest = hashlib.sha256(json.dumps([note["sha256"] for note in notes], sort_keys=True).encode())
    digest.update(tokenizer.content if isinstance(tokenizer, FromFile) else b"bytes")
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "begin_token": tokenizer.begin,
        "fingerprint": digest.hexdigest(),
        "bytes_per_token": size / sum(files.values()),
        "files": dict(sorted(files.items())),
        "token_bytes": list(tokenizer.token_bytes) if exact else [],
    }


def _put_in_place(aside: Path, folder: Path) -> None:
    """Replaces the old dataset by renaming."""
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser("tokens", __doc__)
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        help="files and folders: .jsonl, .parquet, anything else is text, one document a file",
    )
    source.add_argument("--hub", help="a dataset's name on the hub")
    made.add_argument("--split", default="train", help="of the hub's dataset")
    made.add_argument(
        "--field", default="text", help="where .jsonl, .parquet and the hub have the text"
    )
    kind = made.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", help="bytes, or a tokenizer.json")
    kind.add_argument(
        "--train-bpe",
        type=whole(257, 1 << 20),  # all bytes and a begin token, at least
        help="train a byte-level BPE of this many tokens here",
    )
    made.add_argument(
        "--bpe-mib", type=whole(1), default=256, help="text that it is trained on, at most"
    )
    made.add_argument(
        "--begin-token",
        help="the token before each document, where a tokenizer.json has one of an unusual name",
    )
    made.add_argument(
        "--val-share",
        type=float,
        default=0.01,
        help="of the documents that is held out; of a single text, its last part",
    )
    made.add_argument("--workers", type=whole(1), help="processes; by default one a core")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 and one line about what is wrong."""
    wrong = (ConfigError, RankError)  # the latter if a hub cannot be reached any more
    return exit_status(lambda: build(parser().parse_args(arguments)), wrong)


if __name__ == "__main__":
    sys.exit(main())
