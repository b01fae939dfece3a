"""Reads and tokenizes text while training, from a folder or the hub, without building anything
first.

The dataset is cut into as many streams as there are shards, whatever the number of ranks. The
checkpoint holds a cursor for each stream: a file, a row, and how many tokens from there on are
used. Documents come in the order in which they are stored; at its end, a stream begins again. A
document's content decides whether it is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from contract import Arrays, Evaluator, Examples, RunLength, RunSettings, Source
from data.language.sample import Continuation, sample_set
from data.language.text_files import Documents, HubTexts, TextFiles, is_held_out
from data.language.token_files import Corpus
from data.language.tokens import TextKeys, in_sequences
from data.language.windows import HeldOut, batch_of
from data.tokenizer import Bytes, FromFile, TextSpec, Tokenizer
from utils.command.marks import MAY_CHANGE, NAMES_PROJECT
from utils.errors import ConfigError, short

DOCUMENTS_AT_ONCE = 16  # documents tokenized at once
SCANNED = 1 << 16  # documents searched for held-out ones, at most

READ_OFTEN = 1.5  # passes over the files; a run warns from here on

Cursor = Mapping[str, int]
Position = tuple[int, int]  # a file of the shard, and the next row in it


class StreamKeys(TextKeys):
    """The keys of data=stream."""

    hub: Annotated[str | None, MAY_CHANGE, NAMES_PROJECT]
    """Name of a dataset on the hub, instead of data_path"""

    split: str
    """Split of the hub's dataset"""

    field: str
    """The key or column that holds the text"""

    tokenizer: Annotated[str, MAY_CHANGE]
    """The word bytes, or a tokenizer.json"""

    seq_len: PositiveInt
    """Tokens in a window"""

    val_share: Annotated[float, Field(gt=0, lt=1)]
    """Share of the documents that is held out"""

    val_tokens: PositiveInt
    """Held-out tokens in an evaluation"""


class StreamSource(Source):
    """Training windows from streams of documents, one stream for each shard."""

    cursor = ("file", "row", "used", "step")

    def __init__(self, run: RunSettings, keys: StreamKeys) -> None:
        if run.num_workers:
            raise ConfigError(
                f"num_workers={run.num_workers}: data=stream reads in the training process, which"
                " saves its cursors; use num_workers=0"
            )
        if run.max_steps is None and keys.max_tokens is None:
            raise ConfigError(
                "max_steps=null: a stream has no known length; give max_steps or max_tokens"
            )
        # how long the run is, and what a shard reads in each step
        run = replace(in_sequences(run, keys, keys.seq_len), epochs=run.epochs)
        self.length = RunLength.in_steps(run)
        self._shards, self._keys = run.shards, keys
        # the rows of a shard, and the tokens of each
        self.shape = run.global_batch_size // run.shards, keys.seq_len

        self._texts = _open(run.data_path, keys)
        self.where = self._texts.where
        files, left_over = len(self._texts), len(self._texts) % run.shards
        times = 1 + left_over * (run.shards - 1) / files
        if times >= READ_OFTEN:
            self.remark = (
                f"{self.where}: is read {times:.1f} times, as all of shards={run.shards} read"
                f" {left_over} of {files} files; make the number of files a multiple of shards"
            )
        self._tokenizer: Tokenizer = (
            Bytes()
            if keys.tokenizer == "bytes"
            else FromFile(f"data.tokenizer={keys.tokenizer}", Path(keys.tokenizer))
        )
        self._streams: dict[int, _Stream] = {}  # by shard, as they are first read

        # evaluations always see the same tokens, which are read once, here
        held_out = self._held_out()
        self._eval_sets: dict[str, Examples] = {}
        if not (run.eval_only and keys.prompt is not None):
            self._eval_sets["val"] = HeldOut(held_out, keys.seq_len, keys.val_tokens)
        self._eval_sets |= sample_set(held_out, run.seed, keys.seq_len, keys)
        self.spec = TextSpec(
            held_out.vocab_size,
            keys.seq_len,
            token_bytes=self._tokenizer.token_bytes,
            begin_token=held_out.begin,
            tokenizer=self._tokenizer,
            fingerprint=held_out.fingerprint,
            name=held_out.where.partition("=")[2],
        )

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns a shard's rows. May be called for the next step, the last one again, and
        step 0.
        """
        if shard not in self._streams:
            self._streams[shard] = _Stream(self, shard)
        stream = self._streams[shard]
        if step == 0 and stream.step > 1:
            # the run looks at the first step's shapes before it restores the cursors
            stream = _Stream(self, shard)
        return batch_of(stream.rows(step), None)

    def cursors(self, step: int, shards: Sequence[int]) -> dict[int, Cursor]:
        return {shard: self._streams[shard].cursors[step] for shard in shards}

    def go_on(self, cursors: Mapping[int, Cursor]) -> None:
        self._streams = {shard: _Stream(self, shard, cursor) for shard, cursor in cursors.items()}

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [Continuation(self._tokenizer)] if set_name == "sample" else []

    def documents(self, shard: int, *start: int) -> Documents:
        """Returns the documents of a shard from a file and a row on, or from its first."""
        return Documents(self._texts, shard, self._shards, *start)

    def tokens_of(self, texts: Sequence[str], held_out: bool = False) -> list[np.ndarray]:
        """Returns the tokens of the documents to train on, or of the held-out ones, each after a
        begin token.
        """
        share = self._keys.val_share
        wanted = [text for text in texts if text and is_held_out(text, share) == held_out]
        if not wanted:
            return []
        begin = [] if self._tokenizer.begin is None else [self._tokenizer.begin]
        return [
            np.concatenate([begin, ids]).astype(np.uint32) for ids in self._tokenizer.encode(wanted)
        ]

    def _held_out(self) -> Corpus:
        """Reads the first `val_tokens` held-out tokens. The fingerprint is a hash of them, of all
        texts that were searched for them, and of what the files are known to hold.
        """
        # read from the start of the dataset until there are enough, whatever the shards
        keys, size = self._keys, self._tokenizer.vocab_size
        settings = f"{keys.field} {keys.val_share} {size} {self._texts.fingerprint()}"
        digest = hashlib.sha256(settings.encode())
        pieces: list[np.ndarray] = []
        documents = islice(Documents(self._texts), SCANNED)
        while sum(map(len, pieces)) <= keys.val_tokens and (
            texts := list(islice(documents, DOCUMENTS_AT_ONCE))
        ):
            digest.update("".join(texts).encode(errors="surrogatepass"))
            pieces += self.tokens_of(texts, held_out=True)
        # one more, as the last of them is only predicted
        tokens = np.concatenate([*pieces, np.empty(0, np.uint32)])[: keys.val_tokens + 1]
        digest.update(tokens.tobytes())
        return Corpus(
            self._texts.where,
            {"val": [tokens]},
            size,
            digest.hexdigest(),
            self._tokenizer.begin,
            self._tokenizer,
        )


def _open(data_path: str | None, keys: StreamKeys) -> TextFiles | HubTexts:
    if (data_path is None) == (keys.hub is None):
        raise ConfigError(
            f"data_path={short(data_path)} and data.hub={short(keys.hub)}: give one of the two, a"
            " folder of texts or a dataset's name"
        )
    if keys.hub is not None:
        return HubTexts("data.hub=", keys.hub, keys.split, keys.field)
    if keys.split != "train":
        raise ConfigError(
            f"data.split={keys.split}: only a dataset on the hub has splits; give the split's"
            " folder as data_path"
        )
    return TextFiles(str(data_path), keys.field)


class _Stream:
    """One shard's windows, step by step, and the cursor at which the next step continues."""

    def __init__(self, source: StreamSource, shard: int, cursor: Cursor | None = None) -> None:
        self._source, self._shard = source, shard
        if cursor is None:
            self._documents, self._used, self.step = source.documents(shard), 0, 0
        else:
            self._documents = source.documents(shard, cursor["file"], cursor["row"])
            self._used, self.step = cursor["used"], cursor["step"]
        self._texts = iter(self._documents)
        # whether this pass over the shard has given tokens; if the stream goes on from a cursor,
        # an earlier one has
        self._gave = cursor is not None
        # tokens that are not used up but for the first `_used` of them, in pieces, each with the
        # position before it
        self._pieces: list[tuple[Position, np.ndarray]] = []
        self._rows: np.ndarray | None = None  # of the last step
        # by the steps that are done: before and after the last step that was read, which may not be
        # trained yet
        self.cursors = {self.step: self._cursor()}

    def rows(self, step: int) -> np.ndarray:
        """Returns the windows of the next step, or of the last one again, each with one token more
        than it predicts.
        """
        if self._rows is not None and step == self.step - 1:
            return self._rows
        assert step == self.step, (
            f"shard {self._shard}: a stream at step {self.step} cannot give step {step}"
        )
        # windows follow one another through the stream, across documents
        rows, length = self._source.shape
        tokens = self._ahead(rows * length + 1)
        # the last token of a window is the first of the next
        windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
        self._rows = windows[::length].astype(np.int32)
        self._used += rows * length
        # pieces that are used up are dropped, and the cursor moves on with them
        while self._used >= len(self._pieces[0][1]):
            self._used -= len(self._pieces.pop(0)[1])
        self.step += 1
        self.cursors = {step: self.cursors[step], self.step: self._cursor()}
        return self._rows

    def _cursor(self) -> Cursor:
        """Returns the position of the first piece that is not used up, and how much of it is
        used.
        """
        file, row = self._pieces[0][0] if self._pieces else self._documents.position
        return {"file": file, "row": row, "used": self._used, "step": self.step}

    def _ahead(self, count: int) -> np.ndarray:
        """Returns the next `count` tokens. At its end, the stream begins again."""
        # some documents at a time: tokenizing one by one would take much longer
        held = sum(len(tokens) for _, tokens in self._pieces) - self._used
        while held < count:
            before = self._documents.position
            texts = list(islice(self._texts, DOCUMENTS_AT_ONCE))
            if not texts:
                self._begin_again()
            elif pieces := self._source.tokens_of(texts):
                tokens = np.concatenate(pieces)
                self._pieces.append((before, tokens))
                held += len(tokens)
                self._gave = True
        return np.concatenate([tokens for _, tokens in self._pieces])[self._used :][:count]

    def _begin_again(self) -> None:
        if not self._gave:
            raise ConfigError(
                f"{self._source.where}, shard {self._shard}: no documents for training in it; use"
                " fewer shards, or more text"
            )
        self._documents, self._gave = self._source.documents(self._shard), False
        self._texts = iter(self._documents)
