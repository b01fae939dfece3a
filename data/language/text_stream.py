"""Reads and tokenizes text while training, from a folder or the hub, without building anything
first.

The dataset is cut into as many streams as there are shards, whatever the number of ranks. The
checkpoint holds a cursor for each stream: a file, a row, and how many tokens from there on are
used. Documents come in the order in which they are stored; at its end, a stream begins again. A
document's content decides whether it is held out.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic
from pydantic import PositiveInt
from typing_extensions import Doc

from contract import Arrays, EvalSet, Evaluator, RunLength, RunSettings, Source, Spec
from data.language.sample import (
    Continuation,
    NewTokens,
    Prompt,
    Temperature,
    TopK,
    sample_set,
)
from data.language.text_files import Documents, HubTexts, TextFiles
from data.language.token_files import Corpus
from data.language.tokens import sequences, whole_steps
from data.language.windows import HeldOut, batch_of
from data.tokenizer import Bytes, FromFile, Tokenizer
from utils.command.marks import MAY_CHANGE, NAMES_PROJECT
from utils.errors import ConfigError, short

TOGETHER = 16  # documents tokenized at once
SCANNED = 1 << 16  # documents searched for held-out ones, at most

Cursor = Mapping[str, int]
Position = tuple[int, int]  # a file of the shard, and the next row in it


class StreamSource(Source):
    """Training windows from streams of documents, one stream for each shard."""

    cursor = ("file", "row", "used", "step")

    def __init__(
        self,
        run: RunSettings,
        *,
        hub: Annotated[
            str | None,
            MAY_CHANGE,
            NAMES_PROJECT,
            Doc("name of a dataset on the hub, instead of data_path"),
        ],
        split: Annotated[str, Doc("of the hub's dataset")],
        field: Annotated[str, Doc("the key or column that holds the text")],
        tokenizer: Annotated[str, MAY_CHANGE, Doc("bytes, or a tokenizer.json")],
        seq_len: Annotated[PositiveInt, Doc("tokens in a window")],
        val_share: Annotated[
            float, pydantic.Field(gt=0, lt=1), Doc("share of the documents that is held out")
        ],
        val_tokens: Annotated[PositiveInt, Doc("held-out tokens in an evaluation")],
        prompt: Prompt,
        max_new_tokens: NewTokens,
        temperature: Temperature,
        top_k: TopK,
    ) -> None:
        if run.num_workers:
            raise ConfigError(
                f"num_workers={run.num_workers}: data=stream reads in the training process, which"
                " saves where it is; use num_workers=0"
            )
        run.refuse_epochs()
        data_path = run.data_path
        if (data_path is None) == (hub is None):
            raise ConfigError(
                f"data_path={short(data_path)} and data.hub={short(hub)}: give one of the two, a"
                " folder of texts or a dataset's name"
            )
        if hub is None and split != "train":
            raise ConfigError(
                f"data.split={split}: only a dataset on the hub has splits; give the split's folder"
                " as data_path"
            )
        self._batch = sequences(run, seq_len)
        self._shards, self._length, self._share = run.shards, seq_len, val_share
        self._field = field
        steps = whole_steps(run, self._batch, seq_len)
        if steps is None:
            raise ConfigError(
                "max_steps=null: a stream has no known length; give max_steps or max_tokens"
            )
        self.length = RunLength(steps, self._batch, eval_every_steps=run.eval_every_steps)
        self._tokenizer: Tokenizer = (
            Bytes()
            if tokenizer == "bytes"
            else FromFile(f"data.tokenizer={tokenizer}", Path(tokenizer))
        )
        self._texts: TextFiles | HubTexts = (
            TextFiles(data_path, field)
            if data_path is not None
            else HubTexts("data.hub=", str(hub), split, field)
        )
        self._streams: dict[int, _Stream] = {}
        known = self._look(val_tokens)
        self.spec = Spec(
            known.vocab_size,
            seq_len,
            token_bytes=self._tokenizer.token_bytes,
            begin_token=known.begin,
            decode=self._tokenizer.decode,
            tokenizer=self._tokenizer.published,
            fingerprint=known.fingerprint,
            name=known.where.partition("=")[2],
        )
        self._eval_sets: dict[str, EvalSet] = {}
        if not (run.eval_only and prompt is not None):
            self._eval_sets["val"] = HeldOut(known, seq_len, val_tokens)
        self._eval_sets |= sample_set(
            known, run, seq_len, prompt, max_new_tokens, temperature, top_k
        )

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns a shard's rows. May be called for the next step, the last one again,
        and step 0.
        """
        if shard not in self._streams:
            self._streams[shard] = self._stream(shard)
        stream = self._streams[shard]
        if step == 0 and stream.step > 1:
            # the run looks at the first step's shapes before it restores the cursors
            stream = self._stream(shard)
        return batch_of(stream.rows(step), None)

    def cursors(self, step: int, shards: Sequence[int]) -> dict[int, Cursor]:
        return {shard: self._streams[shard].cursor(step) for shard in shards}

    def go_on(self, cursors: Mapping[int, Cursor]) -> None:
        self._streams = {shard: self._stream(shard, cursor) for shard, cursor in cursors.items()}

    def _stream(self, shard: int, cursor: Cursor | None = None) -> _Stream:
        return _Stream(
            f"{self._texts.where}, shard {shard}",
            partial(Documents, self._texts, shard, self._shards),
            self._tokens_of,
            (self._batch // self._shards, self._length),
            cursor,
        )

    def _tokens_of(self, texts: Sequence[str], held_out: bool) -> list[np.ndarray]:
        """Returns the tokens of the held-out documents, or of the others, each after a
        begin token.
        """
        wanted = [text for text in texts if text and self._is_held_out(text) == held_out]
        if not wanted:
            return []
        begin = [] if self._tokenizer.begin is None else [self._tokenizer.begin]
        return [
            np.concatenate([begin, ids]).astype(np.uint32) for ids in self._tokenizer.encode(wanted)
        ]

    def _is_held_out(self, text: str) -> bool:
        return zlib.crc32(text.encode(errors="surrogatepass")) < self._share * (1 << 32)

    def _look(self, most: int) -> Corpus:
        """Returns the first `most` held-out tokens. The fingerprint is a hash of them, of all texts
        that were searched for them, and of what the files are known to hold.
        """
        size, pieces = self._tokenizer.vocab_size, list[np.ndarray]()
        known = f"{self._field} {self._share} {size} {self._texts.fingerprint()}"
        digest = hashlib.sha256(known.encode())
        documents = islice(Documents(self._texts), SCANNED)
        while sum(map(len, pieces)) <= most and (together := list(islice(documents, TOGETHER))):
            digest.update("".join(together).encode(errors="surrogatepass"))
            pieces += self._tokens_of(together, held_out=True)
        tokens = np.concatenate([*pieces, np.empty(0, np.uint32)])[: most + 1]
        digest.update(tokens.tobytes())
        return Corpus(
            self._texts.where,
            {"val": [tokens]},
            size,
            digest.hexdigest(),
            self._tokenizer.begin,
            self._tokenizer,
        )

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [Continuation(self._tokenizer)] if set_name == "sample" else []


class _Stream:
    """One shard's windows, step by step, and the cursor at which the next step continues."""

    def __init__(
        self,
        where: str,
        opened: Callable[..., Documents],
        tokens_of: Callable[..., list[np.ndarray]],
        shape: tuple[int, int],
        cursor: Cursor | None = None,
    ) -> None:
        self._where, self._opened, self._tokens_of, self._shape = where, opened, tokens_of, shape
        self._documents, self._used, self.step = opened(), 0, 0
        if cursor is not None:
            self._documents = opened(cursor["file"], cursor["row"])
            self._used, self.step = cursor["used"], cursor["step"]
        self._texts = iter(self._documents)
        # whether the stream has given tokens since it began
        self._gave = self._here() != _position_of(opened())
        # tokens not yet used up, except the first `_used` of them, each with the position before it
        self._pieces: list[tuple[Position, np.ndarray]] = []
        self._rows: np.ndarray | None = None  # of the last step
        self._cursors = {self.step: self._cursor()}  # those before and after the last step

    def rows(self, step: int) -> np.ndarray:
        """Returns the windows of the next step, or of the last one again, each with one token more
        than it predicts.
        """
        if self._rows is None or step != self.step - 1:
            assert step == self.step, (
                f"{self._where}: a stream at step {self.step} cannot give step {step}"
            )
            rows, length = self._shape
            tokens = self._ahead(rows * length + 1)
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
            self._rows = windows[::length].astype(np.int32)
            self._used += rows * length
            while self._used >= len(self._pieces[0][1]):
                self._used -= len(self._pieces.pop(0)[1])
            self.step += 1
            self._cursors = {
                self.step - 1: self._cursors[self.step - 1],
                self.step: self._cursor(),
            }
        return self._rows

    def cursor(self, step: int) -> Cursor:
        """Returns the cursor after that step. The last step that was read may not be
        trained yet.
        """
        return self._cursors[step]

    def _here(self) -> Position:
        return _position_of(self._documents)

    def _cursor(self) -> Cursor:
        """Returns the position of the first piece that is not used up, and how much of
        it is used.
        """
        file, row = self._pieces[0][0] if self._pieces else self._here()
        return {"file": file, "row": row, "used": self._used, "step": self.step}

    def _ahead(self, count: int) -> np.ndarray:
        """Returns the next `count` tokens. At its end, the stream begins again."""
        held = sum(len(tokens) for _, tokens in self._pieces) - self._used
        while held < count:
            before = self._here()
            if texts := list(islice(self._texts, TOGETHER)):
                if pieces := self._tokens_of(texts, held_out=False):
                    tokens = np.concatenate(pieces)
                    self._pieces.append((before, tokens))
                    held += len(tokens)
                    self._gave = True
            else:
                self._begin_again()
        return np.concatenate([tokens for _, tokens in self._pieces])[self._used :][:count]

    def _begin_again(self) -> None:
        if not self._gave:
            raise ConfigError(
                f"{self._where}: no documents for training in it; use fewer shards, or more text"
            )
        self._documents, self._gave = self._opened(), False
        self._texts = iter(self._documents)


def _position_of(documents: Documents) -> Position:
    return documents.file, documents.row
