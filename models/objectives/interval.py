"""How sure a share of solved examples is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from utils.measure.report import Batch, Prediction, Report

Z = 1.959964  # standard deviations within which 95 % lie


class Interval:
    """The 95 % interval of a metric that counts successes, after Wilson (1927), and among how many it counts them."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._counts: list[Tensor] = []
        self.scalars = (f"{metric}_low", f"{metric}_high", f"{metric}_n")

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        self._counts.append(torch.stack([count.detach().long() for count in prediction.metrics[self._metric]]))

    def rows(self) -> dict[str, Tensor]:
        return {"counts": torch.stack(self._counts).sum(0, keepdim=True).cpu()} if self._counts else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        successes, among = rows["counts"].sum(0).tolist() if rows else (0, 0)
        return Report(dict(zip(self.scalars, (*wilson(successes, among), float(among)), strict=True))) if among else Report()


def wilson(successes: int, among: int) -> tuple[float, float]:
    """Between which shares the true one lies; also near none and all of them, where a normal interval leaves 0 to 1."""
    share, spread = successes / among, Z**2 / among
    centre = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * (share * (1 - share) / among + spread / (4 * among)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)
