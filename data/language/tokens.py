"""Language-model data: windows of tokens from shards on disk, from one corpus or several in fixed
shares.

Without `data_path` the text is the source of Python's own standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt
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
PERIOD = 100_000  # visits, or a few more, in which corpora have their shares


class TokenSource(Source):
    """Training windows in shuffled order, held-out tokens, and a prompt to continue."""

    def __init__(
        self,
        run: RunSettings,
        *,
        seq_len: Annotated[PositiveInt, Doc("tokens in a window")],
        mix: Annotated[
            dict[str, Annotated[int | float, Field(gt=0, lt=1e12)]] | None,
            Doc(
                "corpora, which are folders in data_path, and their shares: {a: 0.7, b: 0.3}; "
                "an epoch is as long as all of them together"
            ),
        ],
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
        self._shards, self._length = run.shards, seq_len
        self._batch = sequences(run, seq_len)
        corpora = _open(
            run.data_path, mix, vocab_size, begin_token, dict(embedded or {"mebibytes": 16})
        )
        first = corpora[0]
        if documents and first.begin is None:
            raise ConfigError(
                f"data.documents=true: {first.where}: nothing tells where documents begin; add"
                " data.begin_token=ID"
            )
        self._begin = first.begin if documents else None
        self._mixture = Mixture([*(mix or {"all": 1}).values()])
        cut = PackedWindows if documents else Windows
        self._windows = [cut(corpus, seq_len) for corpus in corpora]
        names = [*mix] if mix else ["all"]
        self._orders = [
            Order(run.seed, windows.count, stream=f"order {name}")
            for name, windows in zip(names, self._windows, strict=True)
        ]
        steps = whole_steps(run, self._batch, seq_len)
        count = sum(windows.count for windows in self._windows)
        self._steps = cut_evenly(
            count, self._batch, run.epochs if steps is None else None, run.eval_interval
        )
        self._until = steps, run.eval_every_steps
        self._tokenizer = first.tokenizer
        most_documents = [windows.most_documents for windows in self._windows]
        self._eval_sets: dict[str, EvalSet] = {}
        if not (run.eval_only and prompt is not None):
            for name, corpus, share in zip(
                names, corpora, self._mixture.counts / self._mixture.counts.sum(), strict=True
            ):
                most = None if val_tokens is None else max(1, round(val_tokens * float(share)))
                held_out = HeldOut(corpus, seq_len, most, self._begin)
                self._eval_sets[f"val-{name}" if mix else "val"] = held_out
                most_documents.append(held_out.most_documents() if documents else 0)
        self._eval_sets |= sample_set(
            first, run, seq_len, prompt, max_new_tokens, temperature, top_k
        )
        self.spec = Spec(
            vocab_size=first.vocab_size,
            seq_len=seq_len,
            # the same tokens cut differently are different data
            fingerprint="packed-" * documents
            + combined_fingerprint([corpus.fingerprint for corpus in corpora]),
            token_bytes=first.token_bytes,
            name=run.data_path or "Python's standard library",
            begin_token=first.begin,
            most_documents=max(most_documents),
            decode=None if first.tokenizer is None else first.tokenizer.decode,
            tokenizer=None if first.tokenizer is None else first.tokenizer.published,
        )

    @cached_property
    def length(self) -> RunLength:
        return run_length(self._steps, self._batch, *self._until)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step."""
        positions = shard_rows(np.arange(*self._steps.span(step)), shard, self._shards)
        corpus, nth = self._mixture.visits(positions)
        batch: Arrays = {}
        for number, (order, windows) in enumerate(zip(self._orders, self._windows, strict=True)):
            rows = np.flatnonzero(corpus == number)
            if not len(rows):
                continue
            # positions ascend, so a corpus is visited at consecutive ones of its own
            visited = order.visits(nth[rows[0]], nth[rows[-1]] + 1)
            for name, read in windows.read(visited).items():
                if name not in batch:
                    batch[name] = np.empty((len(positions), self._length), np.int32)
                batch[name][rows] = read
        return batch

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return (
            [Continuation(self._tokenizer)]
            if set_name == "sample" and self._tokenizer is not None
            else []
        )


class Mixture:
    """Corpora in fixed shares, evenly spread: which one a position visits follows from it."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.array(weights) / sum(weights)
        # visits to each corpus in a period; all periods are the same
        self.counts = np.maximum(1, np.rint(PERIOD * shares)).astype(np.int64)
        due = [(np.arange(count) + 0.5) / count for count in self.counts]
        order = np.concatenate(due).argsort(kind="stable")
        self._which = np.repeat(np.arange(len(due)), self.counts)[order]
        self._before = np.concatenate([np.arange(count) for count in self.counts])[order]

    def visits(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the corpus of each position, and how often it was visited before."""
        periods, places = np.divmod(positions, len(self._which))
        which = self._which[places]
        return which, periods * self.counts[which] + self._before[places]


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
    mix: Mapping[str, float] | None,
    vocab_size: int | None,
    begin: int | None,
    embedded: Mapping[str, int],
) -> list[Corpus]:
    if data_path is None:
        if mix:
            raise ConfigError(
                f"data.mix={dict(mix)}: needs data_path=FOLDER, the folder in which these corpora"
                " lie by name"
            )
        for key, value in (("vocab_size", vocab_size), ("begin_token", begin)):
            if value is not None:
                raise ConfigError(
                    f"data.{key}={value}: describes token files, but data_path=null reads Python's"
                    f" own library as bytes; add data_path=FOLDER, or leave out data.{key}"
                )
        return [python_text(**embedded)]
    if not mix:
        return [open_corpus(f"data_path={data_path}", Path(data_path), vocab_size, begin)]
    corpora = [
        open_corpus(f"data_path={data_path}, {name}", Path(data_path, name), vocab_size, begin)
        for name in mix
    ]
    for name in ("vocab_size", "begin", "token_bytes"):
        for other in corpora[1:]:
            if getattr(other, name) != getattr(corpora[0], name):
                raise ConfigError(
                    f"{other.where}: has another {name} than {corpora[0].where}; build both with"
                    " one tokenizer"
                )
    return corpora
