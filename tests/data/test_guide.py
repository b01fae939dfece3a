"""The dataset that data/README.md shows is complete."""

from __future__ import annotations

import re

import numpy as np

from data.source import RunSettings
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
    rows = held_out.read(np.arange(len(held_out)))
    assert set(rows["labels"]) == {0, 1}
    assert {name: values.shape[1:] for name, values in held_out.padding(2).items()} == {
        name: values.shape[1:] for name, values in rows.items()
    }
    assert set(re.findall(r"^(\w+):", yaml, re.MULTILINE)) == {"_target_", "noise"}
