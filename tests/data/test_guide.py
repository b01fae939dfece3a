"""The dataset that data/README.md shows is complete."""

from __future__ import annotations

import re

import numpy as np

from data.order import EpochSource
from data.source import IGNORE, Examples, RunSettings, Spec
from tests.ranks import ROOT


def test_the_example_is_a_source() -> None:
    guide = (ROOT / "data" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    example: dict = {}
    exec(compile(code, "data/README.md", "exec"), example)
    run = RunSettings(seed=3, shards=4, global_batch_size=16, max_steps=2)
    source = example["BarSource"](run, noise=0.5)
    first, again = source.train_batch(1, 2), source.train_batch(1, 2)
    assert first["inputs"].shape == (4, *source.spec.image_shape)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["inputs"], source.train_batch(1, 3)["inputs"])
    held_out = source.eval_sets()["bars"]
    assert set(held_out.read(np.arange(len(held_out)))["labels"]) == {0, 1}
    assert set(re.findall(r"^(\w+):", yaml, re.MULTILINE)) == {"_target_", "noise"}


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
