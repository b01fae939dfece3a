"""The texts that frozen language models read, each in its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract import IGNORE, Arrays
from data.source import source_of
from data.tokenizer import FromFile, TextSpec, Tokenizer
from utils.checkpoint import reader
from utils.errors import ConfigError, brief
from utils.files import OBJECT, read_bytes, read_json

MOST = 99  # percent of texts that fit


@dataclass(frozen=True)
class ReaderSpec(TextSpec):
    """The facts of one reader for a net: `seq_len` has room for a passage and its text."""

    passage_len: int = 0
    text_len: int = 0


# a passage, and the pieces of the text after it; whether each is predicted
Passage = tuple[str, list[tuple[str, bool]]]


class Reader:
    """A language model's tokenizer, and how many tokens of it texts take."""

    def __init__(self, key: str, path: str) -> None:
        """Opens the folder of a run on text, or of a published model with its tokenizer.json."""
        self.where = f"{key}={path}"
        folder = Path(path)
        is_published = (folder / "config.json").is_file()
        content, self.vocab_size, self.seq_len = (_published if is_published else _run)(key, folder)
        self.tokenizer = FromFile(self.where, "its tokenizer", content=content)
        # published models expect what their tokenizer puts before every text
        self.begin = self.tokenizer.begin if is_published else None
        self.passage_len = self.text_len = 0

    def measure(self, sample: Sequence[Passage]) -> None:
        """Sets how many tokens passages and texts take, from some of them."""
        encoded = encode(self.tokenizer, sample)
        lengths = np.array([(len(passage), len(text)) for passage, text, _ in encoded])
        most = np.percentile(lengths, MOST, axis=0)
        self.passage_len, self.text_len = np.ceil(most).astype(int).tolist()
        if (needed := self.passage_len + self.text_len + 1) > self.seq_len:
            raise ConfigError(
                f"{self.where}: reads {self.seq_len} tokens, and a passage and its text take"
                f" {needed}; give shorter ones"
            )

    @property
    def spec(self) -> ReaderSpec:
        return ReaderSpec(
            vocab_size=self.vocab_size,
            seq_len=self.passage_len + self.text_len + 1,
            begin_token=self.begin,
            name=self.where,
            passage_len=self.passage_len,
            text_len=self.text_len,
        )

    def read(self, passages: Sequence[Passage]) -> Arrays:
        """Returns passages, padded on the left, texts, padded on the right, and the labels of the
        texts. What is too long loses the beginning of the passage and the end of the text.
        """
        count = len(passages)
        passage = np.full((count, self.passage_len), IGNORE, np.int32)
        text = np.full((count, self.text_len + 1), IGNORE, np.int32)
        labels = text.copy()
        for row, (before, after, wanted) in enumerate(encode(self.tokenizer, passages)):
            # a passage that is too long loses its beginning, a text its end: they meet in the
            # middle
            before = before[-self.passage_len :]
            passage[row, self.passage_len - len(before) :] = before
            length = min(len(after), self.text_len + 1)
            text[row, :length], labels[row, :length] = after[:length], wanted[:length]
        return {"passage": passage, "text": text[:, :-1], "labels": labels[:, 1:]}


def encode(
    tokenizer: Tokenizer, passages: Sequence[Passage]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the tokens of each passage, those of its text, and of these what is predicted; the
    rest is IGNORE.
    """
    of_passages = tokenizer.encode([passage for passage, _ in passages])
    of_pieces = iter(tokenizer.encode([piece for _, text in passages for piece, _ in text]))
    for ids, (_, text) in zip(of_passages, passages, strict=True):
        pieces = [(next(of_pieces).astype(np.int32), predicted) for _, predicted in text]
        wanted = [
            tokens if predicted else np.full_like(tokens, IGNORE) for tokens, predicted in pieces
        ]
        yield ids, np.concatenate([tokens for tokens, _ in pieces]), np.concatenate(wanted)


def _published(key: str, folder: Path) -> tuple[bytes, int, int]:
    try:
        config = read_json(folder / "config.json", OBJECT)
        content = read_bytes(folder / "tokenizer.json")
        return content, int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{key}={folder}: cannot be read ({brief(error)}); give a folder with the config.json"
            " and tokenizer.json of a published model"
        ) from None


def _run(key: str, folder: Path) -> tuple[bytes, int, int]:
    if not folder.exists():
        raise ConfigError(
            f"{key}={folder}: no such folder; give the folder of a run, or the arguments that make"
            " one"
        )
    spec = source_of(reader.config_in(str(folder))).spec
    tokenizer = getattr(spec, "tokenizer", None)
    if tokenizer is None:
        raise ConfigError(
            f"{key}={folder}: {spec.name} has no tokenizer; give a run on text whose tokenizer is"
            " known"
        )
    return tokenizer.published().encode(), spec.vocab_size, spec.seq_len
