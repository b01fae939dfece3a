"""Made-up features: as often there and as large as asked, and functions of seed, step and shard
alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.helpers import everything, global_batch, joined
from tests.making import make_source

KEYS = {"seed": 3, "shards": 8, "global_batch_size": 4096, "max_steps": 10, "num_features": 7}


@pytest.mark.parametrize(
    ("low", "high", "probability"), [(0.0, 1.0, 0.05), (-1.0, 1.0, 0.01), (2.0, 3.0, 1.0)]
)
def test_features_are_there_as_often_and_as_large_as_asked(
    low: float, high: float, probability: float
) -> None:
    source = make_source("features", **KEYS, low=low, high=high, probability=probability)
    values = joined(global_batch(source, step, 8) for step in range(4))["inputs"]
    there, expected = values[values != 0], probability * values.size
    assert abs(len(there) - expected) < 4 * expected**0.5 + 1e-9
    assert low <= there.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < there.max() <= high
    assert abs(there.mean() - (low + high) / 2) < 0.05


def test_evaluations_see_fresh_examples_and_each_feature_alone() -> None:
    source = make_source("features", **KEYS, held_out=100, single=0.5)
    sets = source.eval_sets()
    held_out = everything(sets["features"])
    assert held_out["labels"].tolist() == [0] * 100
    assert not np.array_equal(held_out["inputs"], source.train_batch(0, 0)["inputs"][:100])
    assert np.array_equal(everything(sets["single"])["inputs"], 0.5 * np.eye(7))
