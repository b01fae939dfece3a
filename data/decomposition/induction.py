"""Texts of the induction-head task, as functions of seed, step and shard: a marker S comes before a
token M and again at the end, where M is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from contract import Arrays, Examples, RunSettings, Spec
from data.order import DrawnSource
from utils.command.marks import Keys
from utils.errors import ConfigError
from utils.noise import generator

BEGIN = 0  # the first token of each text


class InductionKeys(Keys):
    """The keys of data=induction."""

    vocab_size: PositiveInt
    """Tokens besides the first one of a text and the marker"""

    seq_len: Annotated[int, Field(ge=5)]
    """Tokens of a text; BEGIN, a token, S, M and S need five"""

    prefix_window: Annotated[int, Field(ge=2)] | None
    """The marker is among so many first tokens; null: anywhere"""

    held_out: PositiveInt
    """Texts in the evaluation set"""


class InductionSource(DrawnSource):
    """BEGIN, tokens with S M among them, S. Each token but BEGIN and S is drawn evenly from
    `vocab_size`; so is the place of the first S, among the first `prefix_window`.
    """

    def __init__(self, run: RunSettings, keys: InductionKeys) -> None:
        super().__init__(run, "induction")
        largest = keys.seq_len - 3
        self._window = largest if keys.prefix_window is None else keys.prefix_window
        if self._window > largest:
            raise ConfigError(
                f"data.prefix_window={keys.prefix_window}: must be at most {largest}, so that S and"
                f" M fit into data.seq_len={keys.seq_len}"
            )
        self._seq_len, self._marker = keys.seq_len, keys.vocab_size + 1
        # held-out texts come from another stream than those of training, and belong to the seed
        texts = self.draw(keys.held_out, generator(run.seed, "held out"))
        labels = np.zeros_like(texts["inputs"])  # all positions count
        self._eval_sets = {"induction": Examples(texts | {"labels": labels})}
        self.spec = Spec(
            vocab_size=keys.vocab_size + 2,
            seq_len=keys.seq_len,
            name=f"induction over {keys.vocab_size} tokens",
        )

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def draw(self, rows: int, rng: np.random.Generator) -> Arrays:
        # M may be any token, also one that occurs elsewhere in the text; S occurs nowhere else
        tokens = rng.integers(1, self._marker, (rows, self._seq_len), dtype=np.int32)
        answer = rng.integers(1, self._marker, rows, dtype=np.int32)
        first = 1 + rng.integers(1, self._window, rows)  # BEGIN and one token precede it
        row = np.arange(rows)
        tokens[:, 0], tokens[:, -1] = BEGIN, self._marker
        tokens[row, first], tokens[row, first + 1] = self._marker, answer
        return {"inputs": tokens, "answer": answer}
