"""Checks that answers to mazes are shortest paths: a maze often has several, and its file names
one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from data.recursive.maze import leads
from data.source import Batch
from utils.measure.evaluator import Prediction, Report
from utils.measure.metrics import format_metrics


class MazePaths:
    """The share of answers that are the maze with a shortest path marked, whichever it is."""

    scalars = ("path_valid",)

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" in prediction.outputs:
            inputs, answers = (
                rows[: len(indices)].cpu().numpy()
                for rows in (batch["inputs"], prediction.outputs["answer"])
            )
            self._found.append(torch.from_numpy(leads(inputs, answers)))

    def rows(self) -> dict[str, Tensor]:
        return {"valid": torch.cat(self._found)} if self._found else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        metrics = {"path_valid": float(rows["valid"].double().mean())}
        return Report(metrics, line=format_metrics(metrics))
