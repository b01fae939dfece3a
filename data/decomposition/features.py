"""Sparse random features, on which toy models are trained, as functions of seed, step and shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from contract import Arrays, Examples, RunSettings, Spec
from data.order import DrawnSource
from utils.command.marks import Keys
from utils.errors import ConfigError
from utils.noise import generator


class FeatureKeys(Keys):
    """The keys of data=features."""

    num_features: PositiveInt
    """Length of a vector"""

    probability: Annotated[float, Field(gt=0, le=1)]
    """Probability that a feature is active"""

    low: float
    """Smallest value of an active feature"""

    high: float
    """Largest value"""

    held_out: NonNegativeInt
    """Examples in the evaluation set `features`"""

    single: float
    """Value of the active feature in the evaluation set `single`, whose examples have one feature
    each"""


@dataclass(frozen=True)
class FeatureSpec(Spec):
    """The facts of features for a net."""

    num_features: int = 0  # the length of an example


class FeatureSource(DrawnSource):
    """Features that are independently active with a probability, and then uniform between `low` and
    `high`.
    """

    def __init__(self, run: RunSettings, keys: FeatureKeys) -> None:
        super().__init__(run, "features")
        if not keys.low < keys.high:
            raise ConfigError(
                f"data.low={keys.low:g}: must be less than data.high={keys.high:g}; for example"
                " data.low=0 data.high=1"
            )
        self._keys = keys
        self._eval_sets: dict[str, Examples] = {}
        if keys.held_out:
            # one draw more of the same, so they belong to the seed as the boards of a generated
            # puzzle do
            drawn = self.draw(keys.held_out, generator(run.seed, "held out"))
            labels = np.zeros(keys.held_out, np.int32)
            self._eval_sets["features"] = Examples(drawn | {"labels": labels})
        # an example of one feature shows which components it needs; no metric counts it
        self._eval_sets["single"] = Examples(
            {
                "inputs": np.eye(keys.num_features, dtype=np.float32) * keys.single,
                "single": np.ones(keys.num_features, np.float32),
                "labels": np.zeros(keys.num_features, np.int32),
            }
        )
        self.spec = FeatureSpec(
            num_features=keys.num_features, name=f"{keys.num_features} features"
        )

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def draw(self, rows: int, rng: np.random.Generator) -> Arrays:
        keys = self._keys
        # two draws for each feature: whether it is active, and its value
        chance, share = rng.random((2, rows, keys.num_features), dtype=np.float32)
        values = share * np.float32(keys.high - keys.low) + np.float32(keys.low)
        return {"inputs": np.where(chance < keys.probability, values, np.float32(0))}
