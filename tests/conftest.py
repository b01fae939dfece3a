"""Shared by all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.fixture(scope="session")
def sudoku_9x9(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small built dataset in HRM's format."""
    folder = tmp_path_factory.mktemp("sudoku") / "tiny"
    command = [sys.executable, "-m", "data.build.sudoku", "--size", "9", "--train", "24", "--test", "8", "--num-aug", "2"]
    subprocess.run([*command, "--output-dir", str(folder)], cwd=ROOT, check=True, timeout=120, capture_output=True)
    return folder
