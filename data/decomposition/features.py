"""Sparse random features, on which toy models are trained, as functions of seed, step and shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt
from typing_extensions import Doc

from contract import Arrays, Examples, RunLength, RunSettings, Source, Spec
from data.order import shard_rows
from utils.errors import ConfigError
from utils.noise import generator


class FeatureSource(Source):
    """Features that are independently active with a probability, and then uniform between `low` and
    `high`.
    """

    def __init__(
        self,
        run: RunSettings,
        *,
        num_features: PositiveInt,
        probability: Annotated[
            float, Field(gt=0, le=1), Doc("probability that a feature is active")
        ],
        low: Annotated[float, Doc("smallest value of an active feature")],
        high: Annotated[float, Doc("largest value")],
        held_out: Annotated[NonNegativeInt, Doc("examples in the evaluation set `features`")],
        single: Annotated[
            float,
            Doc(
                "value of the active feature in the evaluation set `single`, whose examples "
                "have one feature each"
            ),
        ],
    ) -> None:
        run.refuse_path()
        if not low < high:
            raise ConfigError(
                f"data.low={low:g}: must be less than data.high={high:g}; for example data.low=0"
                " data.high=1"
            )
        self._run, self._count = run, num_features
        # the last step and its whole batch, because small draws take as long as large ones
        self._drawn: tuple[int, np.ndarray] | None = None
        self._probability, self._low, self._high = probability, low, high
        self.length = RunLength.in_steps(run)
        # the held-out examples are one draw more of the same, so they belong to the seed as the
        # boards of a generated puzzle do
        drawn = {"features": {"inputs": self._draw(held_out, "held out")}} if held_out else {}
        # an example of one feature shows which components it needs; no metric counts it
        alone = np.eye(num_features, dtype=np.float32)
        drawn["single"] = {"inputs": alone * single, "single": np.ones(num_features, np.float32)}
        self._eval_sets = {
            name: Examples(arrays | {"labels": np.zeros(len(arrays["inputs"]), np.int32)})
            for name, arrays in drawn.items()
        }
        self.spec = Spec(num_features=num_features, name=f"{num_features} features")

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step."""
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, self._draw(self._run.global_batch_size, "features", step)
        return {"inputs": shard_rows(self._drawn[1], shard, self._run.shards)}

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def _draw(self, rows: int, stream: str, *key: int) -> np.ndarray:
        draws = generator(self._run.seed, stream, *key).random(
            (2, rows, self._count), dtype=np.float32
        )
        values = draws[1] * np.float32(self._high - self._low) + np.float32(self._low)
        return np.where(draws[0] < self._probability, values, np.float32(0))
