"""Passages of text with what follows them, in the tokens of an encoder and of every reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from contract import Arrays, Evaluator, Examples, RunSettings, Spec
from data.language.tokens import Corpus, EmbeddedText, open_text
from data.latent.asked import Answers, AskKeys, Said, asked
from data.latent.readers import Passage, Reader, ReaderSpec
from data.order import EpochSource
from utils.errors import ConfigError

SAMPLED = 512  # passages from which the lengths of all are estimated


@dataclass(frozen=True)
class PassageSpec(Spec):
    """The facts of passages for a net: `vocab_size` and `seq_len` are those of the encoder."""

    readers: tuple[ReaderSpec, ...] = ()


def open_readers(paths: Sequence[str], sample: Sequence[Passage]) -> list[Reader]:
    """Opens the readers' tokenizers, and sets how long texts are in their tokens."""
    readers = [Reader(f"arch.readers[{number}]", path) for number, path in enumerate(paths)]
    for reader in readers:
        reader.measure(sample)
    return readers


def read_all(passage: np.ndarray, texts: Sequence[Passage], readers: Sequence[Reader]) -> Arrays:
    """Returns the encoder's tokens, and every reader's, by names that end in its number."""
    batch = {"passage": passage.astype(np.int32)}
    for number, reader in enumerate(readers):
        batch |= {f"{name}_{number}": rows for name, rows in reader.read(texts).items()}
    return batch


class WithOthers(Examples):
    """Held-out passages, each with another one as a control: half the set away, since neighbours
    overlap.
    """

    def __init__(self, passages: Examples) -> None:
        self.passages = passages

    def __len__(self) -> int:
        return len(self.passages)

    def read(self, indices: np.ndarray) -> Arrays:
        others = self.passages.read((indices + len(self) // 2) % len(self))
        read_by_encoder = [name for name in ("passage", "passage_0") if name in others]
        return self.passages.read(indices) | {
            f"other_{name}": others[name] for name in read_by_encoder
        }


class PassageKeys(AskKeys):
    """The keys of data=passages."""

    passage_len: PositiveInt
    """Tokens that latents replace"""

    gap: NonNegativeInt
    """Tokens after the passage that no reader sees, so that its end helps less"""

    text: PositiveInt
    """Tokens after the gap, which are predicted"""

    val_passages: PositiveInt | None
    """Held-out passages in an evaluation; null: all"""

    embedded: EmbeddedText


class Windows(Examples):
    """Passages of one split. Each begins where the text of an earlier one does, so that every text
    is predicted once.
    """

    def __init__(self, corpus: Corpus, split: str, keys: PassageKeys, most: int | None) -> None:
        self._corpus, self._split, self._keys = corpus, split, keys
        self._length = keys.passage_len + keys.gap + keys.text
        self._files = corpus.files[split]
        counts = [max(0, (len(file) - self._length) // keys.text + 1) for file in self._files]
        self._ends = np.cumsum(counts)
        there = int(self._ends[-1]) if counts else 0
        self._count = min(there, most or there)
        self.readers: Sequence[Reader] = ()

    def __len__(self) -> int:
        return self._count

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        windows = np.empty((len(indices), self._length), np.int32)
        for row, index in enumerate(indices.tolist()):
            file = int(np.searchsorted(self._ends, index, side="right"))
            start = (index - (int(self._ends[file - 1]) if file else 0)) * self._keys.text
            windows[row] = self._files[file][start : start + self._length]
            self._corpus.check(self._split, file, start, windows[row])
        return windows

    def texts(self, windows: np.ndarray) -> list[Passage]:
        assert self._corpus.tokenizer is not None
        decode, keys = self._corpus.tokenizer.decode, self._keys
        # readers have their own tokens, so they get the text itself, without the gap
        begins = keys.passage_len + keys.gap
        return [
            (decode(window[: keys.passage_len]), [(decode(window[begins:]), True)])
            for window in windows.tolist()
        ]

    def read(self, indices: np.ndarray) -> Arrays:
        windows = self.tokens(indices)
        return read_all(windows[:, : self._keys.passage_len], self.texts(windows), self.readers)


class PassageSource(EpochSource):
    """Passages of a corpus whose tokenizer is known: Python's standard library or token files."""

    def __init__(self, run: RunSettings, keys: PassageKeys) -> None:
        corpus = open_text(run.data_path, keys.embedded)
        if corpus.tokenizer is None:
            raise ConfigError(
                f"{corpus.where}: its dataset.json names no tokenizer, by which readers could be"
                " given the text; build it with python -m data.build.tokens"
            )
        # both splits are cut alike; a split too short for one window is empty
        train = Windows(corpus, "train", keys, None)
        held_out = Windows(corpus, "val", keys, keys.val_passages)
        if not len(train):
            raise ConfigError(
                f"data.passage_len={keys.passage_len}: no file of {corpus.where} has as many"
                " tokens as a passage, a gap and a text; give a smaller one"
            )
        # a sample from the whole corpus shows how many tokens each reader needs
        spread = np.linspace(0, len(train) - 1, min(SAMPLED, len(train))).astype(np.int64)
        readers = open_readers(keys.readers, train.texts(train.tokens(spread)))
        train.readers = held_out.readers = readers
        spec = PassageSpec(
            vocab_size=corpus.vocab_size,
            seq_len=keys.passage_len,
            fingerprint=corpus.fingerprint,
            name=run.data_path or "Python's standard library",
            readers=tuple(reader.spec for reader in readers),
        )
        self._readers = readers
        own = asked(run, keys, corpus.tokenizer, keys.passage_len, readers)
        super().__init__(run, spec, train, **(own or {"val": WithOthers(held_out)}))

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [(Answers if set_name == "answers" else Said)(self._readers)]
