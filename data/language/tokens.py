"""Language-model data: windows of tokens from shards on disk.

Without `data_path` the text is the source of Python's own standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from contract import Arrays, EvalSet, Evaluator, RunSettings, Source, Spec
from data.language.packing import PackedWindows
from data.language.python_text import python_text
from data.language.sample import Continuation, SampleKeys, sample_set
from data.language.token_files import Corpus, open_corpus
from data.language.windows import HeldOut, Windows
from data.order import Order, cut_evenly, run_length, shard_rows
from utils.command.marks import Keys
from utils.errors import ConfigError

SEQUENCES = 64  # in an update, unless the configuration says otherwise


class EmbeddedText(Keys):
    """The text without data_path."""

    mebibytes: PositiveInt
    """At most so much of Python's standard library to train on"""


class TokenKeys(SampleKeys):
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


class TokenSource(Source):
    """Training windows in shuffled order, held-out tokens, and a prompt to continue."""

    def __init__(self, run: RunSettings, keys: TokenKeys) -> None:
        self._shards = run.shards
        corpus = _open(run.data_path, keys)
        if keys.documents and corpus.begin is None:
            raise ConfigError(
                f"data.documents=true: {corpus.where}: nothing tells where documents begin; add"
                " data.begin_token=ID"
            )
        self._tokenizer = corpus.tokenizer

        # what training visits, in which order
        self._windows = (PackedWindows if keys.documents else Windows)(corpus, keys.seq_len)
        self._order = Order(run.seed, self._windows.count, stream="order all")
        batch = sequences(run, keys.seq_len)
        max_steps = whole_steps(run, batch, keys.seq_len)
        epochs = run.epochs if max_steps is None else None
        self._steps = cut_evenly(self._windows.count, batch, epochs, run.eval_interval)
        self.length = run_length(self._steps, batch, max_steps, run.eval_every_steps)

        # what evaluations read; no held-out text if they only answer a prompt
        most_documents = self._windows.most_documents
        self._eval_sets: dict[str, EvalSet] = {}
        if not (run.eval_only and keys.prompt is not None):
            begin = corpus.begin if keys.documents else None
            held_out = HeldOut(corpus, keys.seq_len, keys.val_tokens, begin)
            self._eval_sets["val"] = held_out
            most_documents = max(most_documents, held_out.most_documents)
        self._eval_sets |= sample_set(corpus, run.seed, keys.seq_len, keys)

        self.spec = Spec(
            vocab_size=corpus.vocab_size,
            seq_len=keys.seq_len,
            # the same tokens cut differently are different data
            fingerprint="packed-" * keys.documents + corpus.fingerprint,
            token_bytes=corpus.token_bytes,
            name=run.data_path or "Python's standard library",
            begin_token=corpus.begin,
            most_documents=most_documents,
            decode=None if corpus.tokenizer is None else corpus.tokenizer.decode,
            tokenizer=None if corpus.tokenizer is None else corpus.tokenizer.published,
        )

    def train_batch(self, step: int, shard: int) -> Arrays:
        visits = self._order.visits(*self._steps.span(step))
        return self._windows.read(shard_rows(visits, shard, self._shards))

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        if set_name == "sample" and self._tokenizer is not None:
            return [Continuation(self._tokenizer)]
        return []


def sequences(run: RunSettings, seq_len: int) -> int:
    """Returns how many sequences an update takes."""
    global_batch_size, tokens_per_update = run.global_batch_size, run.tokens_per_update
    if tokens_per_update is None:
        return global_batch_size or run.shards * max(1, SEQUENCES // run.shards)
    if global_batch_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} and tokens_per_update={tokens_per_update}: both"
            " say how large an update is; give one, and null for the other"
        )
    unit = run.shards * seq_len
    if tokens_per_update % unit:
        nearest = max(1, round(tokens_per_update / unit)) * unit
        product = f"shards × data.seq_len = {run.shards} × {seq_len} = {unit}"
        raise ConfigError(
            f"tokens_per_update={tokens_per_update} is not a multiple of {product}; try {nearest}"
        )
    return tokens_per_update // seq_len


def whole_steps(run: RunSettings, batch: int, seq_len: int) -> int | None:
    """Returns the run's length in steps, if steps or tokens say it; steps come before tokens."""
    if run.max_steps is not None or run.max_tokens is None:
        return run.max_steps
    tokens = batch * seq_len
    if run.max_tokens < tokens:
        raise ConfigError(
            f"max_tokens={run.max_tokens}: one update takes {tokens}; give as many or more"
        )
    return run.max_tokens // tokens


def _open(data_path: str | None, keys: TokenKeys) -> Corpus:
    if data_path is not None:
        key = f"data_path={data_path}"
        return open_corpus(key, Path(data_path), keys.vocab_size, keys.begin_token)
    for name, value in (("vocab_size", keys.vocab_size), ("begin_token", keys.begin_token)):
        if value is not None:
            raise ConfigError(
                f"data.{name}={value}: describes token files, but data_path=null reads Python's own"
                f" library as bytes; add data_path=FOLDER, or leave out data.{name}"
            )
    return python_text(keys.embedded.mebibytes)
