"""Scenes are small JSON files."""

import json
import re

import numpy as np
import torch

from contract import Prediction
from tests.ranks import ROOT
from utils.measure import scene


def test_a_scene_is_json_that_a_browser_reads() -> None:
    made = scene.scene("a", "bars", "</script>", y=[float("nan"), 1 / 3, {"z": float("inf")}], n=3)
    assert json.loads(made["a.scene.json"]) == {
        "kind": "bars",
        "title": "</script>",
        "y": [None, 0.33333, {"z": None}],
        "n": 3,
    }


def test_the_guide_s_evaluator_shows_the_first_twenty_examples() -> None:
    guide = (ROOT / "docs" / "report.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    example: dict = {}
    exec(compile(code, "docs/report.md", "exec"), example)
    errors = [example["Errors"](), example["Errors"]()]  # of two ranks
    for rank, batches in enumerate([[0, 2], [1, 3]]):
        for number in batches:
            indices = np.arange(8 * number, 8 * number + 8 - number)
            outputs = {"error": torch.arange(8 * number, 8 * number + 8).double()}
            errors[rank].add(indices, {}, Prediction({}, outputs))
    shares = [each.rows() for each in reversed(errors)]
    rows = {name: torch.cat([each[name] for each in shares]) for name in shares[0]}
    (drawn,) = errors[0].report(rows).files.values()
    shown = [*range(8), *range(8, 15), *range(16, 20)]
    assert json.loads(drawn)["x"]["values"] == shown
    assert json.loads(drawn)["series"][0]["values"] == shown
    assert example["Errors"]().report(example["Errors"]().rows()).files == {}
