"""Confidence intervals of accuracies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Prediction, Report
from utils.measure.metrics import stack, wilson


class Interval:
    """Reports the 95 % interval (Wilson 1927) of a metric that counts successes, and the number of
    examples.

    A metric may count several parts of an example, such as its tokens. They succeed and fail
    together, so the interval is that of as many trials as there are examples, and too wide where
    they do not.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._counts: list[Tensor] = []
        self._examples = 0
        self.scalars = (f"{metric}_low", f"{metric}_high", f"{metric}_n")

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        counts = stack({self._metric: prediction.metrics[self._metric]})[0]
        self._counts.append(counts.long())
        self._examples += len(indices)

    def rows(self) -> dict[str, Tensor]:
        if not self._counts:
            return {}
        counts = torch.stack(self._counts).sum(0).tolist()
        return {"counts": torch.tensor([[*counts, self._examples]])}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        successes, among, examples = rows["counts"].sum(0).tolist() if rows else (0, 0, 0)
        if not among:
            return Report()
        # tokens of one example are not independent trials, so their share counts once for each
        # example
        trials = min(among, examples)
        values = (*wilson(successes * trials / among, trials), float(trials))
        return Report(dict(zip(self.scalars, values, strict=True)))
