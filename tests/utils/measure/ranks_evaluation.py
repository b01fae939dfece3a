"""One rank of the evaluation tests: `python -m tests.utils.measure.ranks_evaluation FOLDER`,
result in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.measure.evaluation import Evaluation
from utils.measure.evaluator import Batch, Prediction, Report
from utils.ranks import distributed
from utils.ranks.distributed import Dist

EXAMPLES, SIZE = 41, 6  # seven batches, the last of five and a padding row


def batches(
    rank: int, world_size: int, examples: int = EXAMPLES
) -> Iterator[tuple[np.ndarray, Batch]]:
    """As many on each rank."""
    for first in range(0, -(-examples // SIZE), world_size):
        indices = np.arange((first + rank) * SIZE, (first + rank + 1) * SIZE)
        known = indices[indices < examples]
        yield known, {"x": torch.from_numpy(np.where(indices < examples, np.sin(indices), np.nan))}


def predict(batch: Batch) -> Prediction:
    """Sums whose last bits depend on the order in which they are added, and answers."""
    x = batch["x"][~batch["x"].isnan()]
    count = torch.tensor(len(x))
    return Prediction(
        {"sine": (x.sum(), count), "cube": ((x**3).sum() * 1e5, count)},
        {"answer": batch["x"].round()},
    )


class Rows:
    """Keeps of each example as many rows as its index says; finds each once on rank 0."""

    scalars = ("total", "last")

    def __init__(self) -> None:
        self.indices: list[int] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        assert len(indices)
        for index in indices.tolist():
            self.indices += [index] * (index % 4)

    def rows(self) -> dict[str, Tensor]:
        if not self.indices:
            return {}
        index = torch.tensor(self.indices)
        return {
            "index": index,
            "half": (index % 2).bfloat16(),
            "wide": index[:, None, None].expand(-1, 2, 3),
        }

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report(text="nothing")
        order = rows["index"].argsort()
        index = rows["index"][order]
        assert index.tolist() == [index for index in range(EXAMPLES) for _ in range(index % 4)]
        assert torch.equal(rows["half"][order], (index % 2).bfloat16())
        assert torch.equal(rows["wide"][order], index[:, None, None].expand(-1, 2, 3))
        metrics = {"total": float(index.double().log1p().sum()), "last": float("nan")}
        return Report(metrics, {"rows.bin": bytes([len(index)])}, text=f"{len(index)} rows")


def evaluated(dist: Dist) -> dict:
    """Two sets, of which the second has fewer examples than ranks have rows; a set of none; and a
    `predict` that talks to the others.
    """

    def together(batch: Batch) -> Prediction:
        assert sum(dist.sums([1.0])) == dist.world_size
        return predict(batch)

    drawn: list = []
    place = folder(Path(), drawn.append, lambda *given: drawn.append(repr(given)))
    evaluation = Evaluation(dist, 5, place)
    for name, examples, evaluators in (
        ("a", EXAMPLES, [Rows()]),
        ("none", 0, [Rows()]),
        ("b", 4, []),
    ):
        share = batches(dist.rank, dist.world_size, examples)
        assert evaluation.run(name, share, together, evaluators) == 0
    results = evaluation.finish()
    return {
        "results": {name: value.hex() for name, value in results.items()},
        "drawn": drawn,
        "text": evaluation.text,
        "summary": evaluation.summary,
    }


def folder(path: Path, say: Callable = print, write: Callable = lambda *given: None) -> Any:
    """Stands for a run directory."""
    return SimpleNamespace(directory=path, say=say, write_evaluation=write)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    group = distributed.start(device="cpu", timeout_s=30)
    result = evaluated(group)
    (where / f"{group.rank}.json").write_text(json.dumps(result))
    group.sums([1.0])
    distributed.stop()
