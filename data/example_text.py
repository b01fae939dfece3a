"""Shows one example of a set as text, with the model's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from contract import Arrays, Batch, Prediction, Report


class ExampleText:
    """Shows the first example of a set, if the objective has an output named `answer`."""

    scalars = ()

    def __init__(self, text: Callable[[Arrays, np.ndarray], str]) -> None:
        """`text` draws one example and the answer to it."""
        self._text = text
        self._rows: dict[str, Tensor] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if indices[0] == 0 and "answer" in prediction.outputs:
            self._rows = {f"batch.{name}": rows[:1] for name, rows in batch.items()} | {
                "answer": prediction.outputs["answer"][:1]
            }

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        example = {
            name.removeprefix("batch."): tensor[0].numpy()
            for name, tensor in rows.items()
            if name.startswith("batch.")
        }
        return Report(text=self._text(example, rows["answer"][0].numpy()))
