"""The contract between data and everything else: batches as pure functions of (step, shard)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from utils.checkpoint.registry import Registry
from utils.measure.report import Evaluator
from utils.spec import IGNORE, Spec

__all__ = ["IGNORE", "Arrays", "Batch", "EvalSet", "OneExample", "Source", "Spec"]

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


class OneExample:
    """An evaluation set of one example without labels, which is there to be answered and not to be
    measured.
    """

    def __init__(self, **row: Any) -> None:
        self._row = row

    def __len__(self) -> int:
        return 1

    def read(self, indices: np.ndarray) -> Arrays:
        return {
            name: np.stack([np.asarray(value)] * len(indices)) for name, value in self._row.items()
        }

    def padding(self, rows: int) -> Arrays:
        """The example again: ranks without it take as long as the one that has it."""
        return self.read(np.zeros(rows, np.int64))


@dataclass(frozen=True)
class RunLength:
    """How long a run is, and when it is evaluated."""

    total_steps: int
    examples_per_update: int
    # on average: epochs of puzzles with several examples differ in length; None: there are no
    # epochs
    steps_per_epoch: float | None
    # whether an evaluation is due once so many steps are done; always after the last one
    evaluates_after: Callable[[int], bool]


class Source(Protocol):
    """Where a run's examples come from."""

    spec: Spec

    @property
    def length(self) -> RunLength:
        """Read on all ranks at once: counting the steps of ragged epochs takes seconds."""
        ...

    def train_batch(self, step: int, shard: int) -> Arrays:
        """The rows of one shard of one step (steps count from 0)."""
        ...

    def enter(self, saved: Registry) -> None:
        """Enter what checkpoints must hold of it: nothing, unless it streams and has to know where
        each shard goes on.

        Restored before the loader's processes are made, which see what it holds then.
        """
        ...

    def eval_sets(self) -> Mapping[str, EvalSet]:
        """Every example exactly once, by the name of its set."""
        ...

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        """Fresh ones for one evaluation of a set: votes, answers as text, pictures."""
        ...


def combined_fingerprint(fingerprints: Sequence[str]) -> str:
    """The fingerprint of several corpora or datasets together; of one, its own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
