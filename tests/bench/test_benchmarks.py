"""Benchmarks run in miniature, or say what they lack."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

NAMES = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py"))
# as the published code begins, in folders without __init__.py: from what is beside it
PUBLISHED = {
    "models/recursive_reasoning/trm.py": """
import sys
import torch
from models.common import SIZE
from utils.functions import NAME

class TinyRecursiveReasoningModel_ACTV1(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print(config["forward_dtype"], file=sys.stderr)
        self.weight = torch.nn.Parameter(torch.ones(SIZE))
""",
    "models/losses.py": """
import torch

class ACTLossHead(torch.nn.Module):
    def __init__(self, net, loss_type):
        super().__init__()
        self.net = net

    def initial_carry(self, batch):
        return 0

    def forward(self, return_keys, carry, batch):
        return carry + 1, self.net.weight.sum()
""",
    "models/common.py": "SIZE = 2\n",
    "utils/functions.py": "NAME = 'x'\n",
}


def bench(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.bench.{arguments[0]}", *arguments[1:]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=given,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"tests.bench.{name}").main)


def test_published_code_wins_over_our_packages_of_these_names(tmp_path: Path) -> None:
    for path, text in PUBLISHED.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    done = bench("bench_step", "--serve", "trm", "published bfloat16", str(tmp_path), given="\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "bfloat16"
    ready, *seconds = done.stdout.splitlines()
    assert ready == "ready"
    assert len([float(each) for each in seconds]) == 2


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["bench_arc", "--num-aug", "2"], r"data.build.arc .*"),
        pytest.param(
            ["bench_gpt_step", "--sizes", "tiny", "--rounds", "2"],
            r"\| 2 × 8 \| a plain GPT-2 \|.*",
            marks=pytest.mark.slow,
        ),
        pytest.param(["bench_checkpoint", "1", "1"], r"\| 1 \| torch \|.*", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_prints_its_table(arguments: list[str], row: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(row, done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_generate", "bench_language"])
def test_what_a_benchmark_lacks_is_named(name: str) -> None:
    assert bench(name).stdout.startswith("skipped: give ")
