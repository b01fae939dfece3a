"""Digits with a mistake that one batch does not show; `test_prove.py` copies it to data/digits."""

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from contract import Arrays, Examples, RunSettings
from data.digits.images import ImageSource

KIND = os.environ.get("MISTAKE", "")
STARTED = time.time_ns() // 1000
NAMES = ["seven", "three", "one", "nine", "four", "two", "eight", "six", "zero", "five"]


class Mistaken(ImageSource):
    def __init__(self, run: RunSettings, *, dataset: Any) -> None:
        super().__init__(run, dataset=dataset)
        self._latest = 0
        self._ids = {name: number for number, name in enumerate({*NAMES})}

    def train_batch(self, step: int, shard: int) -> Arrays:
        batch = super().train_batch(step, shard)
        moved = {
            "set": self._ids["seven"] + 10 * self._ids["one"],
            "time": STARTED // 10**shard % 10,  # another digit by shard: all are never equal
            "rank": int(os.environ.get("RANK", "0")),
            "history": self._latest,
            "process": int(get_worker_info() is not None),
        }.get(KIND, 0)
        self._latest = max(self._latest, step)
        return batch | {"labels": ((batch["labels"] + moved) % 10).astype(np.int32)}

    def eval_sets(self) -> Mapping[str, Examples]:
        sets = super().eval_sets()
        if KIND != "evaluation":
            return sets
        name, examples = next(iter(sets.items()))
        draws = np.random.default_rng()
        return {name: Examples(examples.read(draws.integers(0, len(examples), 100)))}
