"""Shows the errors of a classifier: its confusion matrix and the first misclassified images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from contract import IGNORE, Batch, Prediction, Report
from utils.measure.scene import fitting, levels, scene

SHOWN = 24  # images


class Confusion:
    """The recall of each class, and a table of answers by the true class."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._counts: Tensor | None = None
        self.scalars = tuple(f"recall_{label}" for label in range(classes))

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" not in prediction.outputs:
            return
        labels, answers = batch["labels"].long(), prediction.outputs["answer"].cpu().long()
        # one number for each cell of the table, row by row
        cells = (labels * self._classes + answers)[labels != IGNORE]
        counts = cells.bincount(minlength=self._classes**2).view(1, self._classes, self._classes)
        self._counts = counts if self._counts is None else self._counts + counts

    def rows(self) -> dict[str, Tensor]:
        # one row, so that ranks gather as many tables as there are ranks
        return {} if self._counts is None else {"counts": self._counts}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        # recall by class for the log, the whole table for the page
        table = rows["counts"].sum(0).tolist()
        names = [str(label) for label in range(self._classes)]
        return Report(
            metrics={
                name: row[label] / sum(row)
                for label, (name, row) in enumerate(zip(self.scalars, table, strict=True))
                if any(row)
            },
            files=scene(
                "confusion",
                "matrix",
                "Confusion matrix",
                "How many images of each class got which answer.",
                row_label="true class",
                column_label="answer",
                shares=True,
                panels=[{"rows": names, "columns": names, "values": table}],
            ),
        )


class Mistakes:
    """The first misclassified images of a set: the same at any number of ranks."""

    scalars: Sequence[str] = ()

    def __init__(self) -> None:
        self._mistakes: list[dict[str, Tensor]] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Takes mistakes until it has SHOWN: a rank meets its own examples in order."""
        outputs, missing = prediction.outputs, SHOWN - len(self._mistakes)
        if not missing or not {"answer", "logits"} <= outputs.keys():
            return
        # for each mistake, the image and how sure the net was of its answer
        labels = batch["labels"][: len(indices)].cpu()
        answers = outputs["answer"][: len(indices)].cpu()
        for row in ((answers != labels) & (labels != IGNORE)).nonzero().flatten()[:missing]:
            share = outputs["logits"][row].cpu().double().softmax(-1)[answers[row]]
            self._mistakes.append(
                {
                    "index": torch.tensor(int(indices[row])),
                    "image": batch["inputs"][row].cpu(),
                    "label": labels[row],
                    "answer": answers[row],
                    "share": share,
                }
            )

    def rows(self) -> dict[str, Tensor]:
        mistakes = self._mistakes
        return (
            {name: torch.stack([row[name] for row in mistakes]) for name in mistakes[0]}
            if mistakes
            else {}
        )

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        # by index, so that the same images are shown whichever rank met them
        items = [
            {
                "pixels": levels((rows["image"][row].double() / 255).flatten().tolist()),
                "answer": int(rows["answer"][row]),
                "truth": int(rows["label"][row]),
                "share": float(rows["share"][row]),
                "index": int(rows["index"][row]),
            }
            for row in rows["index"].argsort()[:SHOWN].tolist()
        ]
        # as many as fit the page's limit, in one scene
        height, width = rows["image"].shape[1:]
        return Report(
            files=fitting(
                items,
                lambda some: scene(
                    "mistakes",
                    "images",
                    "Misclassified images",
                    "The first ones of the set, with the answer, how sure it is, and the truth.",
                    width=width,
                    height=height,
                    items=some,
                ),
            )
        )
