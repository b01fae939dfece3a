"""Build token files for data=tokens from text: files, folders, .jsonl, .parquet, or a dataset on
the hub.

python -m data.build.tokens --input TEXT_FILE_OR_FOLDER --tokenizer bytes --output-dir data/mine
python -m data.build.tokens --input FOLDER_OF_JSONL --field text --train-bpe 8192 \
    --output-dir data/mine
python -m data.build.tokens --hub HuggingFaceFW/fineweb-edu \
    --tokenizer tokenizer.json --output-dir data/fineweb

python -m data.build.tokens --gym spell_backward --tokenizer bytes --output-dir data/backward

draws questions from the package reasoning-gym: each text is a question and, in the next line, its
answer.

The same input gives the same bytes. `tokenizers` uses all cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import gym
from data.build.common import Parser, new_folder, progress, whole
from data.language.text_files import Documents, HubTexts, is_held_out, place_of, read_file
from data.tokenizer import Bytes, FromFile, Tokenizer, train_bpe
from utils.errors import ConfigError, exit_status

# characters tokenized together: the library takes many times their memory
CHARACTERS_AT_ONCE = 1 << 20
TOKENS_IN_A_FILE = 1 << 26
SPLITS = ("train", "val")
WANTED = "give text, .jsonl or .parquet files, or a folder of them"

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
            raise ConfigError(f"{key} {name}: no such file or folder; {WANTED}")
    if not paths:
        raise ConfigError(f"{key} {' '.join(inputs)}: holds no files; {WANTED}")
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
            yield SPLITS[is_held_out(text, share)], text, size


def share_of(documents: Iterator[Document], share: float) -> float:
    """Returns the share that holds out at least one of these documents: `share`, unless there are
    few.
    """
    first = 1.0
    for text, _ in documents:
        first = min(first, place_of(text))
        if first < share:
            return share
    return math.nextafter(first, 1)


def batches_of(documents: Iterator[tuple[str, str, int]]) -> Iterator[list[tuple[str, str, int]]]:
    """Yields documents in batches of at least CHARACTERS_AT_ONCE characters."""
    batch, held = [], 0
    for document in documents:
        batch.append(document)
        held += len(document[1])
        if held >= CHARACTERS_AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class TokenWriter:
    """Writes the tokens of one split to files of TOKENS_IN_A_FILE tokens or a few more."""

    def __init__(self, folder: Path, split: str, dtype: Any) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._held: list[np.ndarray] = []
        self.files: dict[str, int] = {}  # the tokens in each

    def add(self, tokens: np.ndarray) -> None:
        self._held.append(tokens.astype(self._dtype))
        if sum(map(len, self._held)) >= TOKENS_IN_A_FILE:
            self.write()

    def write(self) -> None:
        if self._held:
            tokens, name = np.concatenate(self._held), f"{self._split}_{len(self.files):06}.npy"
            np.save(self._folder / name, tokens)
            self.files[name], self._held = len(tokens), []


def write_tokens(
    folder: Path, tokenizer: Tokenizer, documents: Iterator[tuple[str, str, int]], total: int
) -> tuple[dict[str, dict[str, int]], int, bool]:
    """Writes the tokens of both splits. Returns the tokens in each file, the bytes of the text, and
    whether its tokens have as many. `total` is the size of the input, if it is known.
    """
    # as few bytes as the vocabulary needs, in files that are written as they fill
    sizes = np.array(tokenizer.token_bytes)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    writers = {split: TokenWriter(folder, split, dtype) for split in SPLITS}
    begin = np.array([] if tokenizer.begin is None else [tokenizer.begin], np.uint32)
    text_bytes = bytes_of_tokens = 0
    with progress(total or None, "B", scale=True) as bar:
        # many documents at once, as the library tokenizes them on all cores
        for batch in batches_of(documents):
            pieces: dict[str, list] = {split: [] for split in SPLITS}
            encoded = tokenizer.encode([text for _, text, _ in batch])
            # a begin token before each document, by which packing finds it again
            for (split, text, size), ids in zip(batch, encoded, strict=True):
                if text:
                    pieces[split] += [begin, ids]
                    text_bytes += len(text.encode(errors="surrogatepass"))
                    bytes_of_tokens += int(sizes[ids].sum())
                bar.update(size)
            for split in SPLITS:
                if pieces[split]:
                    writers[split].add(np.concatenate(pieces[split]))
    for writer in writers.values():
        writer.write()
    files = {split: writers[split].files for split in SPLITS}
    # they differ where a tokenizer changes the text, as by lower case: bits per byte would be wrong
    return files, text_bytes, text_bytes == bytes_of_tokens


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a line about it."""
    if not 0 <= options.val_share < 1:
        raise ConfigError(
            f"--val-share {options.val_share}: must be at least 0 and less than 1, for example 0.01"
        )
    paths = find_files("--input", options.input) if options.input else []
    # one plain text is one document, which has to be cut
    single = len(paths) == 1 and paths[0].suffix.lower() not in (".jsonl", ".parquet")

    def read() -> Iterator[Document]:
        if paths:
            return read_files(paths, options.field)
        texts = Documents(HubTexts("--hub ", options.hub, options.split, options.field))
        return ((text, len(text)) for text in texts if text)

    drawn: dict[str, list[tuple[gym.Place, str]]] = {}
    if options.gym:
        counts = {"train": options.train, "val": options.test}
        settings, drawn = gym.draw(options, counts, "an answer in words", asked)
        drawn["val"].sort(key=lambda each: len(each[1]))  # those of one length are asked together
    # a first pass over the documents: in a small corpus the share could hold out none
    share = options.val_share
    if share and not single and not options.gym:
        share = share_of(read(), share)

    def documents() -> Iterator[tuple[str, str, int]]:
        if options.gym:
            return ((split, text, 0) for split in SPLITS for _, text in drawn[split])
        return split_documents(read(), share, single)

    with new_folder(options.output_dir) as folder:
        # one or two further passes, to train a tokenizer and to write tokens: no corpus has to fit
        # in memory
        tokenizer = _tokenizer(options, documents)
        total = sum(path.stat().st_size for path in paths)
        files, text_bytes, exact = write_tokens(folder, tokenizer, documents(), total)
        if not files["train"]:
            where = options.hub or " ".join(options.input)
            raise ConfigError(
                f"{where}: no text is left for training; give more, or a smaller --val-share: 0"
                " holds out none"
            )
        _describe(folder, tokenizer, files["train"] | files["val"], exact)
        if options.gym:
            places = {"val": [place for place, _ in drawn["val"]]}
            (folder / gym.FILE).write_bytes(gym.ABOUT.dump_json(gym.About(settings, places, [])))
    # what was made, and what a user might not expect of it
    train, val = (sum(files[split].values()) for split in SPLITS)
    summary = (
        f"{options.output_dir}: {train:,} tokens for training, {val:,} held out,"
        f" {text_bytes / (train + val):.3f} bytes per token, vocabulary {tokenizer.vocab_size:,}"
    )
    if not exact:
        summary += "; this tokenizer changes the text, so there will be no bits per byte"
    if share > options.val_share:
        summary += (
            "; of so few documents, at least one is held out instead of --val-share"
            f" {options.val_share}"
        )
    return summary


def _describe(folder: Path, tokenizer: Tokenizer, files: dict[str, int], exact: bool) -> None:
    """Writes what a run needs to know of the files; `exact`: their text comes back byte by byte."""
    description = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "begin_token": tokenizer.begin,
        "files": files,
        "token_bytes": list(tokenizer.token_bytes) if exact else [],
    }
    (folder / "dataset.json").write_text(json.dumps(description) + "\n")
    if isinstance(tokenizer, FromFile):
        (folder / "tokenizer.json").write_bytes(tokenizer.content)


def asked(generator: Any, entry: gym.Entry) -> tuple[str, str] | None:
    """Returns a question, and its text with the answer, if it has one."""
    question, answer = entry["question"].strip(), entry["answer"]
    if not isinstance(answer, str) or not gym.accepts(generator, answer, entry):
        return None
    return question, f"{question}\n{answer}"


def _tokenizer(options: argparse.Namespace, documents: Callable[[], Iterator]) -> Tokenizer:
    """Returns bytes, opens the tokenizer's file, or trains a BPE on the training texts."""
    if options.tokenizer == "bytes":
        return Bytes()
    if options.tokenizer:
        return FromFile("--tokenizer", Path(options.tokenizer), options.begin_token)
    texts = (text for split, text, _ in documents() if split == "train")
    content = train_bpe(texts, options.train_bpe, options.bpe_mib << 20).encode()
    return FromFile("--train-bpe", "", options.begin_token, content)


def parser() -> argparse.ArgumentParser:
    options = Parser("tokens", __doc__)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        help="files and folders: .jsonl, .parquet, anything else is text, one document a file",
    )
    source.add_argument("--hub", help="a dataset's name on the hub")
    gym.add_options(options, source)
    for split, count in (("train", 4000), ("test", 500)):
        options.add_argument(
            f"--{split}", type=whole(1), default=count, help="questions, with --gym"
        )
    options.add_argument("--seed", type=whole(0), default=0)
    options.add_argument("--split", default="train", help="of the hub's dataset")
    options.add_argument(
        "--field", default="text", help="where .jsonl, .parquet and the hub have the text"
    )
    kind = options.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", help="bytes, or a tokenizer.json")
    kind.add_argument(
        "--train-bpe",
        type=whole(257, 1 << 20),  # all bytes and a begin token, at least
        help="train a byte-level BPE of this many tokens here",
    )
    options.add_argument(
        "--bpe-mib", type=whole(1), default=256, help="text that it is trained on, at most"
    )
    options.add_argument(
        "--begin-token",
        help="the token before each document, where a tokenizer.json has one of an unusual name",
    )
    options.add_argument(
        "--val-share",
        type=float,
        default=0.01,
        help="of the documents that is held out, at least one; of a single text, its last part",
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
