"""Benchmarks start: each is imported, and those that need more than this repository say so."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench import (
    bench_checkpoint,
    bench_generate,
    bench_gpt_step,
    bench_latent,
    bench_step,
)
from tests.ranks import ROOT

NAMES = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py"))
# as the published code begins, in folders without __init__.py: from what is beside it
PUBLISHED = {
    "hrm": ("models/hrm/hrm_act_v1.py", "HierarchicalReasoningModel_ACTV1"),
    "trm": ("models/recursive_reasoning/trm.py", "TinyRecursiveReasoningModel_ACTV1"),
}
NET = """
import sys

import torch
from models.common import SIZE
from utils.functions import NAME

class {name}(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print(config["forward_dtype"], file=sys.stderr)
        self.weight = torch.nn.Parameter(torch.ones(SIZE))
"""
HEAD = """
import torch

class ACTLossHead(torch.nn.Module):
    def __init__(self, net, loss_type):
        super().__init__()
        self.net = net

    def initial_carry(self, batch):
        return 0

    def forward(self, return_keys, carry, batch):
        return carry + 1, self.net.weight.sum()
"""

# nanoGPT's names, and a text of nothing
CHECKOUT = """
import torch

GPTConfig = dict

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()

    def generate(self, tokens, more, temperature, top_k):
        assert temperature and top_k
        return torch.nn.functional.pad(tokens, (0, more))
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"tests.bench.{name}").main)


def commands() -> list[str]:
    """Each benchmark as RESULTS.md and docs/ start it, without arguments that name a folder which
    only the reader has and what follows them, and each one alone.
    """
    texts = [ROOT / "RESULTS.md", *(ROOT / "docs").rglob("*.md")]
    documented = [
        re.sub(r"( --[a-z-]+)? [A-Z][A-Z/a-z-]*( \d+)?", "", command)
        for path in texts
        for command in re.findall(r"python -m tests\.bench\.(bench_[^`\n]+)", path.read_text())
    ]
    return sorted({*NAMES, *documented})


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_a_benchmark_as_documented_starts(command: str) -> None:
    """It ends well, or measures until it is stopped."""
    name, *arguments = command.split()
    started = subprocess.Popen(
        [sys.executable, "-m", f"tests.bench.{name}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = started.communicate(timeout=30)
        assert started.returncode == 0, errors
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            _, errors = started.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            _, errors = started.communicate()
        assert "Error" not in errors, errors


@pytest.mark.parametrize(("net", "dtype"), [("hrm", "float32"), ("trm", "bfloat16")])
def test_published_code_wins_over_our_packages_of_these_names(
    net: str, dtype: str, tmp_path: Path
) -> None:
    file, name = PUBLISHED[net]
    for path, text in {
        file: NET.format(name=name),
        "models/losses.py": HEAD,
        "models/common.py": "SIZE = 2\n",
        "utils/functions.py": "NAME = 'x'\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    served = [net, f"published {dtype}", str(tmp_path)]
    assert served[1] in bench_step.WAYS
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_step", "--serve", *served],
        cwd=ROOT,
        input="\n\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == dtype
    ready, *seconds = done.stdout.splitlines()
    assert ready == "ready"
    assert len([float(each) for each in seconds]) == 2


@pytest.mark.parametrize("name", ["bench_generate", "bench_latent", "bench_shakespeare"])
def test_what_a_benchmark_lacks_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    importlib.import_module(f"tests.bench.{name}").main()
    assert capsys.readouterr().out.startswith("skipped: give ")


@pytest.mark.slow
def test_steps_of_latents_are_measured_beside_ddp(
    reader_folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_latent", *reader_folders])
    bench_latent.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["wall", "cpu"]
    assert all(float(line.split()[-4]) > 0 for line in lines)


def test_steps_of_language_models_are_measured_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    tiny = ["bench_gpt_step", "--sizes", "tiny", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", tiny)
    bench_gpt_step.main()
    rows = [line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == [*bench_gpt_step.OURS, "a plain GPT-2"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
    step = bench_gpt_step.ours(bench_gpt_step.SIZES["tiny"], {}, torch.float32)
    assert "aten::mm" in bench_gpt_step.profiled(step, 1)
    monkeypatch.setattr(sys, "argv", [*tiny, "--nanogpt", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench_gpt_step.main()
    assert f"--nanogpt {tmp_path}: no checkout of nanoGPT" in capsys.readouterr().err


def test_texts_are_timed_beside_those_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(CHECKOUT)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(bench_generate, "TEXTS", ((bench_gpt_step.SIZES["tiny"], 12),))
    monkeypatch.setattr(
        sys, "argv", ["bench_generate", "--nanogpt", str(tmp_path), "--rounds", "1"]
    )
    bench_generate.main()
    *_, row = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| 8 \| 12 \| [\d.]+ \| [\d.]+ \([\d.]+×\) \| .*×\) \|", row)


def test_a_folder_without_published_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_step", "--trm", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench_step.main()
    assert f"--trm {tmp_path}: no checkout of the published code" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [(), pytest.param((2,), marks=pytest.mark.slow)])
def test_saves_are_measured_in_a_folder_that_git_ignores(
    ranks: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_checkpoint, "WEIGHTS", 1000)
    monkeypatch.setattr(bench_checkpoint, "SAVES", 2)
    monkeypatch.setattr(bench_checkpoint, "WIDTH", 1)
    monkeypatch.setattr(bench_checkpoint, "RANKS", ranks)
    monkeypatch.setattr(sys, "argv", ["bench_checkpoint"])
    bench_checkpoint.main()
    lines = capsys.readouterr().out.splitlines()
    named = [line.split("|")[2].strip() for line in lines if line.startswith("| 2 |")]
    assert named == ["now", "torch", "as many bytes, by one process, fsync"][: 3 * len(ranks)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert not any((tmp_path / "runs").iterdir())
