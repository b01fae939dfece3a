"""The contract between data and everything else: batches as pure functions of (step, shard)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from utils.spec import IGNORE, Spec

__all__ = ["IGNORE", "Arrays", "Batch", "EvalSet", "Source", "Spec"]

Arrays = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


class EvalSet(Protocol):
    """A finite set of examples, each read by its index."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Arrays:
        """These examples, one row each."""
        ...

    def padding(self, rows: int) -> Arrays:
        """Rows that count in no metric, to fill a last batch."""
        ...


class Source(Protocol):
    """Where a run's examples come from."""

    spec: Spec

    @property
    def steps_per_epoch(self) -> float:
        """On average: epochs of puzzles with several examples differ in length."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps in `epochs` epochs, exactly; batches go on beyond them."""
        ...

    def is_eval_step(self, step: int) -> bool:
        """Whether `eval_interval` epochs are complete once `step` steps are done (so the first step is 1 here)."""
        ...

    def train_batch(self, step: int, shard: int) -> Arrays:
        """The rows of one shard of one step (steps count from 0)."""
        ...

    def eval_sets(self) -> Mapping[str, EvalSet]: ...

    def describe(self, example: Arrays, prediction: np.ndarray) -> str:
        """One example and a model's answer to it, for people."""
        ...
