"""Predictions that are kept, on disks that take them and disks that do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from tests.utils.rundir.test_status import fill
from utils.measure.evaluation import Batch, Evaluation
from utils.ranks.distributed import Dist


def batches() -> Iterator[tuple[int, np.ndarray, Batch]]:
    """Three examples in two batches of two, the last row padded."""
    for number, indices in enumerate(([0, 1], [2])):
        yield number, np.array(indices), {"inputs": torch.tensor([[10.0 * number], [10.0 * number + 1]])}


def evaluated(directory: Path, said: list[str]) -> Evaluation:
    evaluation = Evaluation(Dist(), directory, said.append, ["inputs", "answer"])
    one = torch.ones(())
    evaluation.run(
        5, "all", batches(), 2, lambda batch: SimpleNamespace(metrics={"accuracy": (one, one)}, outputs={"answer": batch["inputs"] + 1})
    )
    return evaluation


def test_kept_outputs_have_no_padding(tmp_path: Path) -> None:
    said: list[str] = []
    assert evaluated(tmp_path, said).results() == {"eval/accuracy": 1.0}
    kept = load_file(tmp_path / "step_5_all_preds.0.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in kept.items()} == {
        "index": [0, 1, 2], "inputs": [0.0, 1.0, 10.0], "answer": [1.0, 2.0, 11.0],
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["step_5_all_preds.0.safetensors"]
    assert said == []


def test_a_full_disk_costs_the_outputs_and_not_the_run(small_disk: Path) -> None:
    fill(small_disk)
    said: list[str] = []
    assert evaluated(small_disk, said).results() == {"eval/accuracy": 1.0}
    assert said == ["step_5_all_preds.0.safetensors cannot be written (No space left on device); the run goes on"]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
