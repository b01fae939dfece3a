"""What every further step of thinking is worth: cells, boards and the wish to halt, step by step."""

# B batch, T tokens, S thinking steps

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from utils.measure.figures import line_chart
from utils.measure.report import Batch, Prediction, Report
from utils.spec import IGNORE


class ThinkingSteps:
    """Adds up whole numbers, so that the result does not depend on which rank saw which example."""

    scalars: Sequence[str] = ("exact_accuracy_at_1", "exact_accuracy_at_best", "best_step")

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Count this batch's examples. Those without any label count nowhere, as in the metrics."""
        rows, outputs = slice(len(indices)), prediction.outputs  # on the device, unlike the batch
        cells_B = (batch["labels"][rows] != IGNORE).sum(-1)
        right_BS, q_halt_BS = outputs["right_by_step"][rows].cpu(), outputs["q_halt_by_step"][rows].cpu()
        valid_B1 = (cells_B > 0)[:, None]
        counts = {
            "examples": valid_B1.sum(0),
            "cells": cells_B.sum(0, keepdim=True),
            "right": right_BS.long().sum(0),
            "solved": (valid_B1 & (right_BS == cells_B[:, None])).sum(0),
            "halting": (valid_B1 & (q_halt_BS >= 0)).sum(0),
        }
        self._sums = {name: count + self._sums.get(name, 0) for name, count in counts.items()}

    def rows(self) -> dict[str, Tensor]:
        """One row: this rank's counts."""
        return {name: count[None] for name, count in self._sums.items()}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Shares by step as a chart and as JSON; as metrics the first step, and the best."""
        if not rows or not int(rows["examples"].sum()):
            return Report()
        sums = {name: count.sum(0).to(torch.float64) for name, count in rows.items()}
        shares = {
            "cell_accuracy": sums["right"] / sums["cells"],
            "exact_accuracy": sums["solved"] / sums["examples"],
            "halting": sums["halting"] / sums["examples"],
        }
        lines = {name: share.tolist() for name, share in shares.items()}
        exact = lines["exact_accuracy"]
        best = exact.index(max(exact))
        return Report(
            metrics=dict(zip(self.scalars, (exact[0], exact[best], best + 1.0), strict=True)),
            figures={"thinking_steps": line_chart(lines, "by thinking step")},
            files={"thinking_steps.json": json.dumps({"step": list(range(1, len(exact) + 1)), **lines}) + "\n"},
        )
