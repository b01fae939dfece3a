"""`make gpu` where there is no GPU: the same code, tiny."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.mark.slow
def test_both_parts_are_rehearsed(tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    text = (tmp_path / "gpu-rehearsal.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert done.stdout.startswith("no CUDA device is here")
    assert "5 passed" in text
    assert "| TRM 5M, token mixing, eager | 73," in text
    assert "aten::mm" in text
