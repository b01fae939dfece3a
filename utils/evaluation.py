"""Evaluation over all ranks with the same numbers at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.distributed import Dist
from utils.errors import ConfigError
from utils.metrics import stack

Batch = dict[str, Tensor]
Numbered = Iterable[tuple[int, np.ndarray, Batch]]  # batch number, indices of its examples, tensors


class Evaluation:
    """What the ranks find out about one set of examples."""

    def __init__(self, dist: Dist, keep: Sequence[str] = ()) -> None:
        self.dist, self.keep = dist, keep
        self.first: tuple[Batch, Tensor] | None = None  # batch 0 and the answers to it, where it was computed
        self._saved: list[Batch] = []

    def run(self, batches: Numbered, total: int, predict: Callable[[Batch], Any]) -> tuple[list[str], Tensor]:
        """Metric names and their (sum, count) over all `total` batches; every rank must call it.

        Each batch's sums keep a row of their own and rows are added in order on every rank: with batch boundaries that
        do not depend on the world size, neither does the result, to the last bit.
        """
        names, rows = "", {}
        with self.dist.agreed():
            for number, indices, batch in batches:
                prediction = predict(batch)
                names, rows[number] = " ".join(sorted(prediction.metrics)), stack(prediction.metrics)
                if number == 0:
                    self.first = batch, prediction.outputs["answer"].cpu()
                if self.keep:
                    known = {**batch, **prediction.outputs}
                    kept = {key: known[key][: len(indices)].cpu().contiguous() for key in self.keep}  # padding rows come last
                    self._saved.append(kept | {"index": torch.from_numpy(indices.copy())})
        ordered = next(text.split() for text in self.dist.all_gather_text(names) if text)  # a rank may have had no batch
        table = torch.zeros(total, len(ordered), 2, dtype=torch.float64, device=self.dist.device)
        for number, row in rows.items():
            table[number] = row
        self.dist.all_reduce(table)
        return ordered, table.sum(0)

    def save(self, path: Path) -> None:
        """This rank's share of the kept inputs and outputs, with the index of every example."""
        from safetensors.torch import save_file

        if self._saved:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: torch.cat([piece[key] for piece in self._saved]) for key in self._saved[0]}, path)


def check_names_known(metric: str | None, outputs: Sequence[str], sets: Sequence[str], row: Batch, prediction: Any) -> None:
    """The metric and outputs a configuration names, against what one prediction has."""
    metrics = [f"eval/{name}" for name in prediction.metrics]
    if len(sets) > 1:
        metrics += [f"eval/{key}/{name}" for key in sets for name in prediction.metrics]
    known = {"objective_metric": metrics, "eval_save_outputs": [*row, *prediction.outputs]}
    for key, wanted in (("objective_metric", [metric] if metric else []), ("eval_save_outputs", outputs)):
        if unknown := [name for name in wanted if name not in known[key]]:
            raise ConfigError(f"{key}={unknown[0]}: not known here; choose from {', '.join(sorted(known[key]))}")
