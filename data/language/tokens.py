"""Language-model data: windows of tokens from shards on disk.

Without `data_path` the text is the source of Python's own standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import Doc

from contract import Arrays, EvalSet, Evaluator, RunLength, RunSettings, Source, Spec
from data.language.packing import PackedWindows
from data.language.python_text import python_text
from data.language.sample import (
    Continuation,
    NewTokens,
    Prompt,
    Temperature,
    TopK,
    sample_set,
)
from data.language.token_files import Corpus, open_corpus
from data.language.windows import HeldOut, Windows
from data.order import Order, cut_evenly, run_length, shard_rows
from data.source import combined_fingerprint
from utils.errors import ConfigError

SEQUENCES = 64  # in an update, unless the configuration says otherwise


class TokenSource(Source):
    """Training windows in shuffled order, held-out tokens, and a prompt to continue."""

    def __init__(
        self,
        run: RunSettings,
        *,
        seq_len: Annotated[PositiveInt, Doc("tokens in a window")],
        documents: Annotated[
            bool,
            Doc(
                "windows hold whole documents and pieces of long ones; attention stays within a "
                "document"
            ),
        ],
        vocab_size: Annotated[
            PositiveInt | None,
            Doc("size of the vocabulary, where dataset.json does not give it or gives less"),
        ],
        begin_token: Annotated[
            NonNegativeInt | None,
            Doc("the id before each document, where dataset.json does not give it"),
        ],
        val_tokens: Annotated[
            PositiveInt | None, Doc("held-out tokens in an evaluation; null: all")
        ],
        prompt: Prompt,
        max_new_tokens: NewTokens,
        temperature: Temperature,
        top_k: TopK,
        embedded: Annotated[
            dict[str, Any] | None, Doc("at most so much of Python's standard library to train on")
        ],
    ) -> None:
        self._shards = run.shards
        self._batch = sequences(run, seq_len)
        corpus = _open(run.data_path, vocab_size, begin_token, embedded or {"mebibytes": 16})
        if documents and corpus.begin is None:
            raise ConfigError(
                f"data.documents=true: {corpus.where}: nothing tells where documents begin; add"
                " data.begin_token=ID"
            )
        self._windows = (PackedWindows if documents else Windows)(corpus, seq_len)
        count = self._windows.count
        self._order = Order(run.seed, count, stream="order all")
        steps = whole_steps(run, self._batch, seq_len)
        self._steps = cut_evenly(
            count, self._batch, run.epochs if steps is None else None, run.eval_interval
        )
        self._until = steps, run.eval_every_steps
        self._tokenizer = corpus.tokenizer
        most_documents = self._windows.most_documents
        self._eval_sets: dict[str, EvalSet] = {}
        if not (run.eval_only and prompt is not None):
            held_out = HeldOut(corpus, seq_len, val_tokens, corpus.begin if documents else None)
            self._eval_sets["val"] = held_out
            if documents:
                most_documents = max(most_documents, held_out.most_documents())
        self._eval_sets |= sample_set(
            corpus, run, seq_len, prompt, max_new_tokens, temperature, top_k
        )
        self.spec = Spec(
            vocab_size=corpus.vocab_size,
            seq_len=seq_len,
            # the same tokens cut differently are different data
            fingerprint="packed-" * documents + combined_fingerprint([corpus.fingerprint]),
            token_bytes=corpus.token_bytes,
            name=run.data_path or "Python's standard library",
            begin_token=corpus.begin,
            most_documents=most_documents,
            decode=None if corpus.tokenizer is None else corpus.tokenizer.decode,
            tokenizer=None if corpus.tokenizer is None else corpus.tokenizer.published,
        )

    @cached_property
    def length(self) -> RunLength:
        return run_length(self._steps, self._batch, *self._until)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step."""
        positions = shard_rows(np.arange(*self._steps.span(step)), shard, self._shards)
        return self._windows.read(self._order.visits(positions[0], positions[-1] + 1))

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return (
            [Continuation(self._tokenizer)]
            if set_name == "sample" and self._tokenizer is not None
            else []
        )


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


def _open(
    data_path: str | None,
    vocab_size: int | None,
    begin: int | None,
    embedded: Mapping[str, int],
) -> Corpus:
    if data_path is None:
        for key, value in (("vocab_size", vocab_size), ("begin_token", begin)):
            if value is not None:
                raise ConfigError(
                    f"data.{key}={value}: describes token files, but data_path=null reads Python's"
                    f" own library as bytes; add data_path=FOLDER, or leave out data.{key}"
                )
        return python_text(**embedded)
    return open_corpus(f"data_path={data_path}", Path(data_path), vocab_size, begin)
