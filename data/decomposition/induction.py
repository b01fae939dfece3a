"""Texts of the induction-head task, as functions of seed, step and shard: a marker S stands before
a token M and again at the end, where M is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt
from typing_extensions import Doc

from contract import Arrays, Examples, RunLength, RunSettings, Source, Spec
from data.order import shard_rows
from utils.errors import ConfigError
from utils.noise import generator

BEGIN = 0  # the first token of each text


class InductionSource(Source):
    """BEGIN, tokens with S M among them, S. Each token but BEGIN and S is drawn evenly from
    `vocab_size`; so is the place of the first S, among the first `prefix_window`.
    """

    def __init__(
        self,
        run: RunSettings,
        *,
        vocab_size: Annotated[
            PositiveInt, Doc("tokens besides the first one of a text and the marker")
        ],
        seq_len: Annotated[int, Field(ge=5), Doc("BEGIN, a token, S, M and S need five")],
        prefix_window: Annotated[
            Annotated[int, Field(ge=2)] | None,
            Doc("the marker stands among so many tokens; null: anywhere"),
        ],
        held_out: Annotated[PositiveInt, Doc("texts in the evaluation set")],
    ) -> None:
        run.refuse_path()
        self._window = seq_len - 3 if prefix_window is None else prefix_window
        if self._window > seq_len - 3:
            raise ConfigError(
                f"data.prefix_window={prefix_window}: must be at most {seq_len - 3}, so that S and"
                f" M fit into data.seq_len={seq_len}"
            )
        self._run, self._vocab_size, self._seq_len = run, vocab_size, seq_len
        self._drawn: tuple[int, Arrays] | None = None  # the last step and its whole batch
        self.length = RunLength.in_steps(run)
        texts = self._draw(held_out, "held out")
        labels = np.zeros_like(texts["inputs"])  # all positions count
        self._eval_sets = {"induction": Examples(texts | {"labels": labels})}
        self.spec = Spec(
            vocab_size=vocab_size + 2,
            seq_len=seq_len,
            name=f"induction over {vocab_size} tokens",
        )

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the texts of one shard of one step."""
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, self._draw(self._run.global_batch_size, "induction", step)
        texts = self._drawn[1]
        return {name: shard_rows(texts[name], shard, self._run.shards) for name in texts}

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def _draw(self, rows: int, stream: str, *place: int) -> Arrays:
        draws = generator(self._run.seed, stream, *place)
        marker, each = self._vocab_size + 1, np.arange(rows)
        tokens = draws.integers(1, marker, (rows, self._seq_len), dtype=np.int32)
        answer = draws.integers(1, marker, rows, dtype=np.int32)
        first = 1 + draws.integers(1, self._window, rows)  # BEGIN and one token stand before it
        tokens[:, 0], tokens[each, first], tokens[each, first + 1] = BEGIN, marker, answer
        tokens[:, -1] = marker
        return {"inputs": tokens, "answer": answer}
