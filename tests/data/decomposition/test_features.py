"""Made-up features: as often there and as large as asked, and functions of seed, step and shard
alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.making import make_source
from utils.errors import ConfigError

KEYS = {"seed": 3, "shards": 8, "global_batch_size": 4096, "max_steps": 10, "num_features": 7}


@pytest.mark.parametrize(
    ("low", "high", "probability"), [(0.0, 1.0, 0.05), (-1.0, 1.0, 0.01), (2.0, 3.0, 1.0)]
)
def test_features_are_there_as_often_and_as_large_as_asked(
    low: float, high: float, probability: float
) -> None:
    source = make_source("features", **KEYS, low=low, high=high, probability=probability)
    values = np.concatenate(
        [source.train_batch(step, shard)["inputs"] for step in range(4) for shard in range(8)]
    )
    there = values[values != 0]
    assert (
        abs(len(there) / values.size - probability) < 4 * (probability / values.size) ** 0.5 + 1e-9
    )
    assert low <= there.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < there.max() <= high
    assert abs(there.mean() - (low + high) / 2) < 0.05


def test_evaluations_see_fresh_examples_and_each_feature_alone() -> None:
    source = make_source("features", **KEYS, held_out=100, single=0.5)
    sets = source.eval_sets()
    held_out = sets["features"].read(np.arange(100))
    assert held_out["labels"].tolist() == [0] * 100
    assert not np.array_equal(held_out["inputs"], source.train_batch(0, 0)["inputs"][:100])
    assert np.array_equal(
        sets["single"].read(np.arange(7))["inputs"], 0.5 * np.eye(7, dtype=np.float32)
    )


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.low=1: must be less than data.high=1"):
        make_source("features", **KEYS, low=1.0)
    with pytest.raises(ConfigError, match=r"data_path=x: this data is drawn anew, not read"):
        make_source("features", **KEYS, data_path="x")
    with pytest.raises(ConfigError, match="max_steps=null"):
        make_source("features", **KEYS | {"max_steps": None})
