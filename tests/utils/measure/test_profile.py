"""Traces of a few steps."""

import json
from pathlib import Path

import pytest
import torch

from utils.measure.profile import traced


@pytest.mark.parametrize("taken", [7, 4])
def test_a_trace_of_a_few_steps_is_written_even_of_a_short_run(taken: int, tmp_path: Path) -> None:
    said: list[str] = []
    with traced(2, tmp_path, said.append) as step_is_done:
        for _ in range(taken):
            torch.ones(8) @ torch.ones(8)
            step_is_done()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [each for each in events if str(each.get("name")).startswith("ProfilerStep")]
    assert len(steps) == min(2, taken - 3) + (taken == 4)
    assert any(each.get("name") == "aten::dot" for each in events)
    assert said == [f"trace of 2 steps: {tmp_path / 'trace.json'}"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
