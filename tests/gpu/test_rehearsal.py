"""`make gpu` where there is no GPU: the same code, tiny."""

import re
import sys
from pathlib import Path

import pytest

from tests.runs import launched


@pytest.mark.slow
def test_all_parts_are_rehearsed(tmp_path: Path) -> None:
    words = ["env", "CUDA_VISIBLE_DEVICES=", "PART=1234", f"OUT={tmp_path}"]
    done = launched([*words, sys.executable, "-m", "tests.gpu"], timeout=300)
    text = (tmp_path / "gpu-rehearsal.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert done.stdout.startswith("no CUDA device is here")
    assert "5 passed" in text
    assert re.search(r"TRM 5M, token mixing, eager \| [0-9.]+ \| [0-9,]+ \| – \| [0-9.]+ \|", text)
    assert re.search(r"beam=1 arch.loss.search_steps=64` \| step_\d+ \| [0-9.]+ % \(", text)
    assert re.search(r"\| GPT-2, optim=muon, CUDA graphs \| [0-9.]+ \|", text)
    assert (tmp_path / "ema.safetensors").exists()
