"""The same texts, questions and answers as plain text for a language model: questions follow their
text.

A model learns to look up facts in short texts within hundreds of steps, and in long ones only from
there: with `growing_steps`, training begins with the shortest texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import Doc

from data.latent.qa import FormKeys, HeldOutShare, Hub, Skip, StoriesKeys, open_sets
from data.latent.qa_examples import EMPTY, Form, Ragged, Tokens
from data.latent.qa_files import Example
from data.order import Order, cut_evenly, generator, run_length, shard_rows
from data.source import IGNORE, Arrays, EvalSet, RunLength, RunSettings, Source, Spec
from data.tokenizer import Bytes, FromFile, Tokenizer, check_encodes, train_bpe
from utils.errors import ConfigError

BPE = "bpe:"
BPE_LETTERS = 10_000_000  # letters on which it is trained, at most
STRIDE = 32  # while texts grow, rows have a multiple of so many positions
# Which pieces are predicted: 0 is the begin token, 1 the text, then questions and answers in turns
PREDICTED: dict[str, Callable[[int], bool]] = {
    "all": lambda number: True,
    "questions": lambda number: number >= 2,
    "answers": lambda number: number >= 2 and number % 2 == 1,
}


class QAText(Source):
    """Every text once an epoch, with all its questions and answers.

    In the first `growing_steps`, texts are drawn with replacement: at first from the shortest, and
    from more and more of them, in order of length.
    """

    def __init__(
        self,
        run: RunSettings,
        *,
        hub: Hub,
        held_out: HeldOutShare,
        skip: Skip,
        seq_len: Annotated[
            PositiveInt, Doc("tokens of the longest text with its questions and answers")
        ],
        tokenizer: Annotated[
            str, Doc("bytes; bpe:SIZE, trained on the training texts; or a tokenizer.json")
        ],
        predict: Annotated[
            Literal["all", "questions", "answers"],
            Doc("which tokens count: all, those of questions and answers, or those of answers"),
        ],
        growing_steps: Annotated[
            NonNegativeInt,
            Doc("steps in which training goes from the shortest texts to all of them"),
        ],
        form: FormKeys,
        stories: StoriesKeys,
    ) -> None:
        self._run, self._growing_steps, shown = run, growing_steps, Form(**form)
        sets = open_sets(run, hub, held_out, stories, skip, all_words=True)
        texts = [
            text
            for example in (sets["train"] or sets["test"])
            for text in (shown.text(example.context), *shown.asked(example))
        ]
        self.tokenizer = _tokenizer(tokenizer, texts)
        check_encodes(f"data.tokenizer={tokenizer}", self.tokenizer, texts)
        if self.tokenizer.begin is None:
            raise ConfigError(
                f"data.tokenizer={tokenizer}: has no token that begins a text; give another"
            )
        self._sets = {
            name: Texts(some, shown, self.tokenizer, seq_len, skip, predict)
            for name, some in sets.items()
        }
        self._order = Order(run.seed, np.arange(max(1, len(self._sets["train"]))))
        self._steps = cut_evenly(
            self._order.items, run.global_batch_size, run.epochs, run.eval_interval
        )
        content = [
            self.tokenizer.name,
            getattr(self.tokenizer, "content", b""),
            *(each.content for each in self._sets.values()),
        ]
        self.spec = Spec(
            vocab_size=self.tokenizer.vocab_size,
            seq_len=seq_len,
            begin_token=self.tokenizer.begin,
            decode=self.tokenizer.decode,
            tokenizer=self.tokenizer.published,
            name=run.data_path or hub or "made-up stories",
            fingerprint=hashlib.sha256(repr(content).encode(errors="surrogatepass")).hexdigest(),
        )

    @cached_property
    def length(self) -> RunLength:
        run = self._run
        return run_length(self._steps, run.global_batch_size, run.max_steps, run.eval_every_steps)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step."""
        texts, visits = self._sets["train"], self._visits(step)
        # all shards have one width, as if one process read them all
        width = texts.width_of(visits) if self._growing_steps else None
        return texts.read(shard_rows(visits, shard, self._run.shards), width)

    def _visits(self, step: int) -> np.ndarray:
        """Returns the numbers of a step's texts."""
        if step >= self._growing_steps:
            return self._order.visits(*self._steps.span(step))
        by_length = self._sets["train"].by_length
        joined = -(-len(by_length) * (step + 1) // self._growing_steps)
        draw = generator(self._run.seed, "growing texts", step)
        return by_length[draw.integers(joined, size=self._run.global_batch_size)]

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return {"test": self._sets["test"]}


class Texts:
    """A set of texts, read by index as inputs and labels."""

    def __init__(
        self,
        examples: Sequence[Example],
        form: Form,
        tokenizer: Tokenizer,
        seq_len: int,
        skip: bool,
        predict: str,
    ) -> None:
        self._width = seq_len
        about: dict[str, list[int]] = {}
        for index, example in enumerate(examples):
            about.setdefault(example.context, []).append(index)
        tokens = Tokens(examples, list(about), form, tokenizer)
        inputs, labels = [], []
        longest, where = 0, ""  # of the texts that are too long
        for text, members in enumerate(about.values()):
            dialogue = [
                piece
                for index in members
                for piece in (tokens.questions.row(index), tokens.answers.row(index))
            ]
            pieces = [np.array([tokenizer.begin], np.int32), tokens.contexts.row(text), *dialogue]
            row = np.concatenate(pieces)
            if len(row) <= seq_len + 1:
                counted = [PREDICTED[predict](number) for number in range(len(pieces))]
                inputs.append(row[:-1])
                labels.append(
                    np.where(np.repeat(counted, [len(piece) for piece in pieces]), row, IGNORE)[1:]
                )
            elif len(row) - 1 > longest:
                longest, where = len(row) - 1, examples[members[0]].where
        if longest and not (skip and inputs):
            done = (
                ", or add data.skip=true, which leaves such texts out"
                if inputs
                else "; data.skip=true leaves none of them"
            )
            raise ConfigError(
                f"data.seq_len={seq_len}: the longest text has {longest} tokens with its questions"
                f" ({where}); give {longest}{done}"
            )
        self._inputs, self._labels = Ragged(inputs), Ragged(labels)
        self.content = hashlib.sha256(b"".join(row.tobytes() for row in inputs)).hexdigest()

    def __len__(self) -> int:
        return len(self._inputs)

    @cached_property
    def by_length(self) -> np.ndarray:
        """Returns the texts' numbers, shortest first."""
        return self._inputs.lengths.argsort(kind="stable")

    def width_of(self, indices: np.ndarray) -> int:
        """Returns the positions that these texts need, rounded up."""
        longest = int(self._inputs.lengths[indices].max())
        return min(self._width, -(-longest // STRIDE) * STRIDE)

    def read(self, indices: np.ndarray, width: int | None = None) -> Arrays:
        """Returns rows of `width` positions, by default as many as the longest text may have."""
        width = width or self._width
        inputs, labels = (each.read(indices, width) for each in (self._inputs, self._labels))
        return {
            "inputs": np.where(inputs == EMPTY, 0, inputs),
            "labels": np.where(inputs == EMPTY, IGNORE, labels),
        }

    def padding(self, rows: int) -> Arrays:
        return {
            "inputs": np.zeros((rows, self._width), np.int32),
            "labels": np.full((rows, self._width), IGNORE, np.int32),
        }


def _tokenizer(name: str, texts: Sequence[str]) -> Tokenizer:
    """Opens `bytes` or a file, or trains a BPE on these texts, which is the same every time."""
    if name == "bytes":
        return Bytes()
    if not name.startswith(BPE):
        return FromFile("data.tokenizer", Path(name))
    size = name.removeprefix(BPE)
    if not (size.isascii() and size.isdigit() and 257 <= int(size) <= 1 << 20):
        raise ConfigError(f"data.tokenizer={name}: give {BPE}SIZE, with 257 tokens or more")
    return FromFile(
        "data.tokenizer", name, content=train_bpe(iter(texts), int(size), BPE_LETTERS).encode()
    )
