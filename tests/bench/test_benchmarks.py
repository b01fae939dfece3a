"""Benchmarks run in miniature, or say what they lack."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.ranks import ROOT
from tests.runs import launched

NAMES = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py"))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return launched([sys.executable, "-m", f"tests.bench.{arguments[0]}", *arguments[1:]])


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"tests.bench.{name}").main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["bench_arc", "--num-aug", "2"], r"data.build.arc .*"),
        (["bench_checkpoint", "1", "1"], r"\| 1 \| torch \|.*"),
        (["bench_edit"], "skipped: give RUN, .*"),
        (["bench_gpt_step"], "skipped: give --nanogpt FOLDER, .*"),
    ],
)
def test_a_benchmark_prints_its_table(arguments: list[str], row: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(row, done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["bench_arc", "--data", "GONE"],
        ["bench_arc", "--trm", "GONE"],
        ["bench_components", "--spd", "GONE"],
        ["bench_edit", "GONE"],
        ["bench_language", "--nanogpt", "GONE"],
        ["bench_search", "GONE", "GONE"],
        ["bench_step", "--trm", "GONE"],
    ],
)
def test_a_wrong_path_is_one_line(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r".*GONE: .*\n", done.stderr)
