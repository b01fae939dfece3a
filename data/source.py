"""The contract between data and everything else: batches as pure functions of (step, shard)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

IGNORE = -100  # label of cells and rows that count in no loss and no metric

Arrays = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """What a model must know of its data."""

    vocab_size: int = 0
    seq_len: int = 0
    num_puzzles: int = 0
    num_classes: int = 0
    image_shape: tuple[int, ...] = ()
    fingerprint: str = ""


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
    steps_per_epoch: float
    total_steps: int  # steps in `epochs` epochs, exactly
    eval_every: int  # steps in `eval_interval` epochs, exactly

    def train_batch(self, step: int, shard: int) -> Arrays:
        """The rows of one shard of one step (steps count from 0)."""
        ...

    def eval_sets(self) -> Mapping[str, EvalSet]: ...

    def describe(self, example: Arrays, prediction: np.ndarray) -> str:
        """One example and a model's answer to it, for people."""
        ...
