"""A map-style dataset, as data/README.md says, becomes a source of whole epochs."""

from __future__ import annotations

import numpy as np

from contract import IGNORE, Examples, RunSettings, Spec
from data.order import EpochSource


def test_a_map_style_dataset_is_a_source_with_epochs() -> None:
    rows = [{"inputs": np.full(3, number), "labels": number} for number in range(20)]
    run = RunSettings(seed=3, shards=4, global_batch_size=20, epochs=2)
    made = EpochSource(run, Spec(), Examples(rows), test=Examples(rows[:5]))
    assert made.length.total_steps == 2
    visited = [made.train_batch(1, shard)["labels"] for shard in range(4)]
    assert sorted(np.concatenate(visited)) == [*range(20)]
    test = made.eval_sets()["test"]
    assert test.read(np.array([4, 2]))["inputs"].tolist() == [[4] * 3, [2] * 3]
    assert test.padding(2)["labels"].tolist() == [IGNORE] * 2
