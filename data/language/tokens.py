"""Language-model data: windows of tokens from shards on disk.

Without `data_path` the text is the source of Python's own standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from contract import Evaluator, Examples, RunSettings
from data.gym import FILE
from data.language.packing import PackedWindows
from data.language.python_text import python_text
from data.language.sample import Continuation, SampleKeys, asked_set, sample_set, shown, unescaped
from data.language.token_files import Corpus, open_corpus
from data.language.windows import HeldOut, Windows
from data.order import EpochSource
from data.tokenizer import TextSpec
from utils.command.marks import SAME_RUN, Keys
from utils.errors import ConfigError

__all__ = [
    "Corpus",
    "EmbeddedText",
    "SampleKeys",
    "TokenSource",
    "open_text",
    "shown",
    "unescaped",
]

SEQUENCES = 64  # in an update, unless the configuration says otherwise


class EmbeddedText(Keys):
    """The text without data_path."""

    mebibytes: PositiveInt
    """At most so much of Python's standard library to train on"""

    bpe: Annotated[int, Field(ge=257, le=1 << 16)] | None
    """Tokens in a vocabulary of byte pairs, found in this text; null: bytes"""


class TextKeys(SampleKeys):
    """The keys of every source of text. Two have the values of root keys, which tell whether it is
    the same run.
    """

    tokens_per_update: Annotated[PositiveInt | None, SAME_RUN] = None
    """The size of an update, as the root key `tokens_per_update` says"""

    max_tokens: Annotated[PositiveInt | None, SAME_RUN] = None
    """The length of the run, as the root key `max_tokens` says"""


class TokenKeys(TextKeys):
    """The keys of data=tokens."""

    seq_len: PositiveInt
    """Tokens in a window"""

    documents: bool
    """Windows hold whole documents and pieces of long ones; attention stays within a document"""

    vocab_size: PositiveInt | None
    """Size of the vocabulary, where dataset.json does not give it or gives less"""

    begin_token: NonNegativeInt | None
    """The id before each document, where dataset.json does not give it"""

    val_tokens: PositiveInt | None
    """Held-out tokens in an evaluation; null: all"""

    embedded: EmbeddedText


class TokenSource(EpochSource):
    """Training windows in shuffled order, held-out tokens, and a prompt to continue."""

    def __init__(self, run: RunSettings, keys: TokenKeys) -> None:
        # training reads windows of consecutive tokens, or windows packed with whole documents
        corpus = open_text(run.data_path, keys.embedded, keys.vocab_size, keys.begin_token)
        if keys.documents and corpus.begin is None:
            raise ConfigError(
                f"data.documents=true: {corpus.where}: it is unknown where documents begin; add"
                " data.begin_token=ID"
            )
        self._tokenizer = corpus.tokenizer
        windows = (PackedWindows if keys.documents else Windows)(corpus, keys.seq_len)
        most_documents = windows.most_documents

        eval_sets: dict[str, Examples] = {}
        if not (run.eval_only and keys.prompt is not None):  # a prompt is answered alone
            begin = corpus.begin if keys.documents else None
            held_out = HeldOut(corpus, keys.seq_len, keys.val_tokens, begin)
            eval_sets["val"] = held_out
            most_documents = max(most_documents, held_out.most_documents)
            asked, self._judges = asked_set(corpus, Path(run.data_path or "") / FILE)
            eval_sets |= asked
        eval_sets |= sample_set(corpus, run.seed, keys.seq_len, keys)

        spec = TextSpec(
            vocab_size=corpus.vocab_size,
            seq_len=keys.seq_len,
            # the same tokens cut differently are different data
            fingerprint="packed-" * keys.documents + corpus.fingerprint,
            token_bytes=corpus.token_bytes,
            name=run.data_path or "Python's standard library",
            begin_token=corpus.begin,
            most_documents=most_documents,
            tokenizer=corpus.tokenizer,
        )
        super().__init__(in_sequences(run, keys, keys.seq_len), spec, windows, **eval_sets)

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        if set_name == "sample" and self._tokenizer is not None:
            return [Continuation(self._tokenizer)]
        return self._judges() if set_name == "asked" else []


def in_sequences(run: RunSettings, keys: TextKeys, seq_len: int) -> RunSettings:
    """Returns the settings of a run that counts an update and its length in sequences and steps,
    whether they are given so or in tokens. Steps come before tokens, and both before epochs.
    """
    # an update is given in sequences or in tokens; from here on it counts sequences
    batch, tokens = run.global_batch_size, keys.tokens_per_update
    if batch and tokens is not None:
        raise ConfigError(
            f"global_batch_size={batch} and tokens_per_update={tokens}: both say how large an"
            " update is; give one, and null for the other"
        )
    # a number of tokens must fill whole sequences in every shard
    if tokens is not None:
        unit = run.shards * seq_len
        if tokens % unit:
            nearest = max(1, round(tokens / unit)) * unit
            product = f"shards × data.seq_len = {run.shards} × {seq_len} = {unit}"
            raise ConfigError(
                f"tokens_per_update={tokens} is not a multiple of {product}; try {nearest}"
            )
        batch = tokens // seq_len
    elif not batch:
        batch = run.shards * max(1, SEQUENCES // run.shards)

    # the length of the run, likewise
    max_steps = run.max_steps
    if max_steps is None and keys.max_tokens is not None:
        max_steps = keys.max_tokens // (batch * seq_len)
        if not max_steps:
            raise ConfigError(
                f"max_tokens={keys.max_tokens}: one update takes {batch * seq_len}; give as many or"
                " more"
            )
    # where steps are counted, windows follow each other across epochs, and none is left out
    epochs = run.epochs if max_steps is None else None
    return replace(run, global_batch_size=batch, max_steps=max_steps, epochs=epochs)


def open_text(
    data_path: str | None,
    embedded: EmbeddedText,
    vocab_size: int | None = None,
    begin: int | None = None,
) -> Corpus:
    """Opens the token files in a folder; without one, Python's standard library."""
    if data_path is not None:
        return open_corpus(f"data_path={data_path}", Path(data_path), vocab_size, begin)
    for name, value in (("vocab_size", vocab_size), ("begin_token", begin)):
        if value is not None:
            raise ConfigError(
                f"data.{name}={value}: describes token files, but data_path=null reads Python's own"
                f" library; add data_path=FOLDER, or leave out data.{name}"
            )
    return python_text(embedded.mebibytes, embedded.bpe)
