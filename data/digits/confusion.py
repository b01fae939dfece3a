"""Which classes a classifier takes for which."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from data.source import IGNORE, Batch
from utils.measure.evaluator import Prediction, Report
from utils.measure.scene import scene
from utils.measure.svg import heat_map


class Confusion:
    """Counts answers by the true class: the recall of each class, the table as a picture and as
    JSON.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._counts: Tensor | None = None
        self.scalars = tuple(f"recall_{label}" for label in range(classes))

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" not in prediction.outputs:
            return
        labels, answers = batch["labels"].long(), prediction.outputs["answer"].cpu().long()
        cells = (labels * self._classes + answers)[labels != IGNORE]
        counts = cells.bincount(minlength=self._classes**2).view(1, self._classes, self._classes)
        self._counts = counts if self._counts is None else self._counts + counts

    def rows(self) -> dict[str, Tensor]:
        return {} if self._counts is None else {"counts": self._counts}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        table = rows["counts"].sum(0).tolist()
        names = [str(label) for label in range(self._classes)]
        return Report(
            metrics={
                name: row[label] / sum(row)
                for label, (name, row) in enumerate(zip(self.scalars, table, strict=True))
                if any(row)
            },
            figures={
                "confusion": heat_map(table, names, names, "true class by row, answer by column")
            },
            files={
                "confusion.json": json.dumps(
                    {"rows": "true class", "columns": "answer", "counts": table}
                )
                + "\n",
                **scene(
                    "confusion",
                    "matrix",
                    "Confusion matrix",
                    "How many images of each class were taken for which.",
                    row_label="true class",
                    column_label="answer",
                    shares=True,
                    panels=[{"rows": names, "columns": names, "values": table}],
                ),
            },
        )
