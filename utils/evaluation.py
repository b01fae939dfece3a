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
        for number, indices, batch in batches:
            prediction = predict(batch)
            names, rows[number] = " ".join(sorted(prediction.metrics)), stack(prediction.metrics)
            if number == 0:
                self.first = batch, prediction.outputs["answer"].cpu()
            if self.keep:
                self._saved.append(self._chosen({**batch, **prediction.outputs}, indices))
        known = next(text.split() for text in self.dist.all_gather_text(names) if text)  # a rank may have had no batch
        table = torch.zeros(total, len(known), 2, dtype=torch.float64, device=self.dist.device)
        for number, row in rows.items():
            table[number] = row
        self.dist.all_reduce(table)
        return known, table.sum(0)

    def save(self, path: Path) -> None:
        """This rank's share of the kept inputs and outputs, with the index of every example."""
        from safetensors.torch import save_file

        if self._saved:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: torch.cat([piece[key] for piece in self._saved]) for key in self._saved[0]}, path)

    def _chosen(self, known: Batch, indices: np.ndarray) -> Batch:
        if unknown := [key for key in self.keep if key not in known]:
            raise ConfigError(f"eval_save_outputs={unknown}: unknown; choose from {', '.join(sorted(known))}")
        kept = {key: known[key][: len(indices)].cpu().contiguous() for key in self.keep}  # padding rows come last
        return kept | {"index": torch.from_numpy(indices.copy())}
