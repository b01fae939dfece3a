"""Text read while training: a dataset on the hub or in a folder, tokenized on the fly, with nothing built first.

The dataset is cut into as many streams as there are shards, whatever the number of ranks, and each shard's stream has a
cursor in the checkpoint: where `datasets` stands in it, and how many of the tokens behind that are used. Documents come in
the order in which they are stored; at its end a stream begins again. Which are held out their content decides.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.order import cut_evenly, make_plan
from data.sample import Continuation, prompt_set, prompt_tokens
from data.source import Arrays, EvalSet, Plan, Spec
from data.tokenizer import Bytes, FromFile, Tokenizer
from data.tokens import sequences, whole_steps
from data.windows import HeldOut, batch_of
from utils.checkpoint.registry import Registry
from utils.errors import ConfigError, RankError, brief, short
from utils.measure.report import Evaluator

KINDS = {".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
TOGETHER = 16  # documents tokenized at once
SCANNED = 1 << 16  # documents looked at for held-out ones, at most
STATE = 1 << 12  # bytes of a cursor for what `datasets` says of where it is, which takes some hundred
ENDLESS = 1 << 60  # windows that a stream may give

Cursor = dict[str, Tensor]


class StreamSource:
    """Training windows from streams of documents, one stream for each shard."""

    def __init__(
        self,
        *,
        seed: int,
        shards: int,
        num_workers: int = 0,
        global_batch_size: int | None = None,
        tokens_per_update: int | None = None,
        epochs: int | None = None,
        eval_interval: int | None = None,
        max_tokens: int | None = None,
        max_steps: int | None = None,
        eval_every_steps: int | None = None,
        eval_only: bool = False,
        data_path: str | None = None,
        hub: str | None = None,
        split: str = "train",
        field: str = "text",
        tokenizer: str = "bytes",
        seq_len: int = 256,
        val_share: float = 0.05,
        val_tokens: int = 1 << 16,
        prompt: str | None = None,
        max_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> None:
        if num_workers:
            raise ConfigError(
                f"num_workers={num_workers}: data=stream reads in the training process, which saves where it is; use num_workers=0"
            )
        for key, value in (("epochs", epochs), ("eval_interval", eval_interval)):
            if value is not None:
                raise ConfigError(f"{key}={value}: a stream has no epochs; use max_steps or max_tokens, and eval_every_steps")
        if (data_path is None) == (hub is None):
            raise ConfigError(
                f"data_path={short(data_path)} and data.hub={short(hub)}: give one of the two, a folder of texts or a dataset's name"
            )
        self._where = f"data_path={data_path}" if data_path is not None else f"data.hub={hub}"
        self._batch = sequences(global_batch_size, tokens_per_update, shards, seq_len)
        self._shards, self._length, self._field, self._share = shards, seq_len, field, val_share
        steps = whole_steps(max_steps, max_tokens, self._batch, seq_len)
        if steps is None:
            raise ConfigError("max_steps=null: a stream has no known length; give max_steps or max_tokens")
        self._until = steps, eval_every_steps
        self._tokenizer: Tokenizer = Bytes() if tokenizer == "bytes" else FromFile(f"data.tokenizer={tokenizer}", Path(tokenizer))
        self._dataset = _open(self._where, data_path, hub, split)
        self._streams: dict[int, _Stream] = {}
        self._done = lambda: 0  # steps of the run, once a registry tells
        held_out, self.spec = self._look(val_tokens)
        self._eval_sets: dict[str, EvalSet] = (
            {} if eval_only and prompt is not None else {"val": HeldOut([held_out], seq_len, val_tokens, None)}
        )
        tokens = prompt_tokens(prompt, self._tokenizer, self._tokenizer.begin, [held_out], seq_len)
        if tokens is not None and max_new_tokens:
            self._eval_sets["sample"] = prompt_set(tokens, max_new_tokens, temperature, top_k, seed)

    @cached_property
    def plan(self) -> Plan:
        return replace(make_plan(cut_evenly(ENDLESS, self._batch, None, None), self._batch, *self._until), steps_per_epoch=None)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """The rows of one shard of one step: the next one, or the last one again. Step 0 may be asked for at any time."""
        if shard not in self._streams:
            self._streams[shard] = self._stream(shard)
        stream = self._streams[shard]
        if step == 0 and stream.step > 1:
            stream = self._stream(shard)  # what the first step would see, of which only the form matters then
        return batch_of(stream.rows(step), None)

    def enter(self, saved: Registry) -> None:
        """A cursor for each shard."""
        self._done = lambda: saved.standing.step
        saved.add_by_shard("text", self._cursors, self._go_on, _like)

    def _cursors(self) -> dict[int, Cursor]:
        return {shard: stream.cursor(self._done()) for shard, stream in self._streams.items()} if self._done() else {}

    def _go_on(self, cursors: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._streams = {shard: self._stream(shard, cursor or None) for shard, cursor in cursors.items()}

    def _stream(self, shard: int, cursor: Mapping[str, Tensor] | None = None) -> _Stream:
        from datasets.distributed import split_dataset_by_node

        def opened() -> Any:
            return split_dataset_by_node(self._dataset, shard, self._shards)

        return _Stream(f"{self._where}, shard {shard}", opened, self._tokens_of, (self._batch // self._shards, self._length), cursor)

    def _tokens_of(self, rows: Sequence[Mapping[str, Any]], held_out: bool) -> list[np.ndarray]:
        """The tokens of those documents that are held out, or of the others, each behind a begin token."""
        texts = [_text(self._where, row, self._field) for row in rows]
        wanted = [
            text for text in texts if text and (zlib.crc32(text.encode(errors="surrogatepass")) < self._share * (1 << 32)) == held_out
        ]
        begin = [] if self._tokenizer.begin is None else [self._tokenizer.begin]
        return [np.concatenate([begin, ids]).astype(np.uint32) for ids in self._tokenizer.encode(wanted)] if wanted else []

    def _look(self, most: int) -> tuple[np.ndarray, Spec]:
        """The first so many held-out tokens, by which the data is known."""
        found: list[np.ndarray] = []
        rows = islice(_read(self._where, self._dataset), SCANNED)
        while sum(map(len, found)) <= most and (together := list(islice(rows, TOGETHER))):
            found += self._tokens_of(together, held_out=True)
        tokens = np.concatenate([*found, np.empty(0, np.uint32)])[: most + 1]
        digest = hashlib.sha256(f"{self._field} {self._share} {self._tokenizer.vocab_size}".encode() + tokens.tobytes())
        tokenizer = self._tokenizer
        spec = Spec(tokenizer.vocab_size, self._length, token_bytes=tokenizer.token_bytes, decode=tokenizer.decode)
        return tokens, replace(spec, fingerprint=f"sampled-{digest.hexdigest()}", name=self._where.partition("=")[2])

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [Continuation(self._tokenizer)] if set_name == "sample" else []


class _Stream:
    """One shard's windows, step by step, and the cursor from which the next step goes on."""

    def __init__(
        self, where: str, opened: Callable[[], Any], tokens_of: Callable[..., list[np.ndarray]], shape: tuple[int, int],
        cursor: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._where, self._opened, self._tokens_of, self._shape = where, opened, tokens_of, shape
        self._dataset, self._used, self.step = opened(), 0, 0
        self._state: Any = None  # of `datasets`, behind the last document that was read; nothing at the beginning
        if cursor is not None:
            self._state = json.loads(bytes(cursor["state"].tolist()))
            self._used, self.step = int(cursor["used"]), int(cursor["step"])
            if self._state is not None:
                self._dataset.load_state_dict(self._state)
        self._fruitful = self._state is not None  # whether there was anything to train on since the stream began
        self._documents = _read(where, self._dataset)
        self._pieces: list[tuple[Any, np.ndarray]] = []  # tokens not yet used up, of the first of them `_used`; and the state before each
        self._rows: np.ndarray | None = None  # of the last step
        self._cursors = {self.step: self._here()}  # before the last step, and behind it

    def rows(self, step: int) -> np.ndarray:
        """Windows of one token more than a step predicts in them: of the next step, or of the last one again."""
        if self._rows is None or step != self.step - 1:
            assert step == self.step, f"{self._where}: a stream at step {self.step} cannot give step {step}"
            rows, length = self._shape
            tokens = self._ahead(rows * length + 1)
            self._rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length].astype(np.int32)
            self._used += rows * length
            while self._used >= len(self._pieces[0][1]):
                self._used -= len(self._pieces.pop(0)[1])
            self.step += 1
            self._cursors = {self.step - 1: self._cursors[self.step - 1], self.step: self._here()}
        return self._rows

    def cursor(self, step: int) -> Cursor:
        """From where that step goes on: a step may be loaded that is not trained yet."""
        return self._cursors[step]

    def _here(self) -> Cursor:
        """Of one size, as all that shards remember: where `datasets` stood, and how many tokens behind that are used."""
        state = json.dumps(self._pieces[0][0] if self._pieces else self._state).encode().ljust(STATE)
        assert len(state) == STATE, f"{self._where}: a state of {len(state)} bytes"
        return {"state": torch.tensor(list(state), dtype=torch.uint8), "used": torch.tensor(self._used), "step": torch.tensor(self.step)}

    def _ahead(self, count: int) -> np.ndarray:
        """The next so many tokens; at the end of the stream it begins again."""
        held = sum(len(tokens) for _, tokens in self._pieces) - self._used
        while held < count:
            if documents := list(islice(self._documents, TOGETHER)):
                before, self._state = self._state, self._dataset.state_dict()
                if found := self._tokens_of(documents, held_out=False):
                    self._pieces.append((before, np.concatenate(found)))
                    held, self._fruitful = held + len(self._pieces[-1][1]), True
            elif self._fruitful:
                self._state, self._dataset, self._fruitful = None, self._opened(), False
                self._documents = _read(self._where, self._dataset)
            else:
                raise ConfigError(f"{self._where}: no documents for training in it; use fewer shards, or more text")
        return np.concatenate([tokens for _, tokens in self._pieces])[self._used :][:count]


def _like(saved: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """What a cursor must be like; before the first step there is none."""
    if not saved and not step:
        return {}
    state = torch.empty(STATE, dtype=torch.uint8, device="meta")
    return {"state": state} | {name: torch.empty((), dtype=torch.int64, device="meta") for name in ("used", "step")}


def _open(where: str, data_path: str | None, hub: str | None, split: str) -> Any:
    """The dataset as it streams."""
    from datasets import load_dataset

    try:
        if data_path is None:
            return load_dataset(hub, split=split, streaming=True)
        place = Path(data_path)
        found = [place] if place.is_file() else place.rglob("*")
        files = sorted(path for path in found if path.suffix in KINDS and path.is_file())
        kinds = {KINDS[path.suffix] for path in files}
        if len(kinds) != 1:
            what = "no such file or folder" if not place.exists() else "files of several kinds" if kinds else "no texts"
            raise ConfigError(f"{where}: {what}; give .jsonl, .parquet or .txt files of one kind, or a folder of them")
        (kind,) = kinds
        more = {"sample_by": "document"} if kind == "text" else {}
        return load_dataset(kind, data_files=[str(path) for path in files], split="train", streaming=True, **more)
    except ConfigError:
        raise
    except Exception as error:  # whatever `datasets` and the hub's client raise, the user's way out is the same
        raise ConfigError(
            f"{where}: cannot be read ({brief(error)}); correct it, or build tokens with python -m data.build.tokens"
        ) from None


def _read(where: str, dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Its rows; what goes wrong on the way is one line."""
    try:
        yield from dataset
    except Exception as error:
        raise RankError(f"{where}: cannot be read any further ({brief(error)}); the run goes on from its checkpoint") from None


def _text(where: str, row: Mapping[str, Any], field: str) -> str:
    if field not in row:
        raise ConfigError(f"data.field={field}: {where}: its rows have {brief(', '.join(row))}; name the field that holds the text")
    if not isinstance(row[field] or "", str):
        raise ConfigError(f"data.field={field}: {where}: holds {type(row[field]).__name__}, not text; name another field")
    return row[field] or ""
