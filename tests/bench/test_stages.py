"""The table of stages says what its runs say, and a rerun does what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import stage_table
from tests.bench.stage_table import Stage, measured, page
from tests.runs import launched

ONE, PAIR, EXACT = Stage("one"), Stage("allreduce", 2), Stage("exact", 2, nodes=2)


def made_up(
    folder: Path,
    rates: list[float],
    accuracy: float = 0.9,
    loss: float = 0.3,
    first: float = 2.0,
    bits: str = "aaaa1111",
) -> None:
    """A finished run of 64 samples a step, logged every 10 steps of an epoch of 20."""
    folder.mkdir(parents=True)
    rows: list[dict] = []
    for number, rate in enumerate(rates, 1):
        speeds = {
            "speed/examples_per_s": rate,
            "speed/step_ms": 64e3 / rate,
            "memory/peak_bytes": number * 2**20,
        }
        rows.append(
            {"step": 10 * number, "epoch": number / 2, "train/loss": first / number, **speeds}
        )
    rows.append(
        {
            "step": 10 * len(rates),
            "eval/accuracy": accuracy,
            "eval/accuracy_n": 500.0,
            "eval/loss": loss,
        }
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("objective_metric: eval/accuracy\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    (folder / "log.txt").write_text(
        "net\n2 ranks by torchrun on host: CPU with 1 of 2 threads, float32\n"
    )
    (folder / "bits").write_text(bits)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One process at 100 samples/s, two ranks at 160."""
    monkeypatch.setattr(stage_table, "digest", lambda folder: (folder / "bits").read_text())
    made_up(tmp_path / ONE.name, [10.0, 80.0, 100.0, 120.0])
    made_up(
        tmp_path / PAIR.name,
        [160.0, 160.0, 160.0, 1000.0],
        accuracy=0.92,
        loss=0.25,
        first=2.5,
        bits="bbbb2222",
    )
    made_up(tmp_path / EXACT.name, [50.0, 50.0])
    return tmp_path


def test_every_cell_is_what_the_runs_say(runs: Path) -> None:
    runs_of = {stage: run for stage in (ONE, PAIR, EXACT) if (run := measured(runs / stage.name))}
    lines = page("head", "1", runs_of, {Stage("fsdp", 4): "failed: no"}).splitlines()
    table = {
        line.split(" | ")[0]: line.strip("| ").partition(" | ")[2]
        for line in lines
        if line.startswith("|")
    }
    assert lines[1] == "Computed on host: CPU with 1 of 2 threads, float32; OMP_NUM_THREADS=1."
    assert table["| one process"] == (
        "100 | 41.9 | 1.00 | 100% | 4 | 90.00% of 500 | 0.3000 | – | – | – | `aaaa1111`"
    )
    assert table["| `sync=allreduce`, 2 ranks"] == (
        "160 | 6.3 | 1.60 | 80% | 4 | 92.00% of 500 | 0.2500"
        " | +5.0e-01 | -0.0500 | +2.00 points | `bbbb2222`"
    )
    assert table["| `exact=true`, 2 ranks on 2 nodes (srun)"] == (
        "50 | 25.6 | 0.50 | 25% | 2 | 90.00% of 500 | 0.3000"
        " | the same bits | the same bits | the same bits | `aaaa1111`"
    )
    assert table["| `sync=fsdp`, 4 ranks"].startswith("failed: no")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "DataParallel" in [*table][3], "right behind what it would be"


def stages(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {"OUT": str(folder), "EPOCHS": "1", "WAYS": "exact", "RANKS": "1 2", **variables}
    words = [f"{key}={value}" for key, value in settings.items()]
    return launched(["env", *words, sys.executable, "-m", "tests.bench.stages"], timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_two_stages_from_nothing_and_again(tmp_path: Path) -> None:
    done = stages(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "digits-1"
    text = (folder / "stages.md").read_text()
    digests = {
        line.rpartition("| `")[2] for line in text.splitlines() if line.startswith("| `exact=true`")
    }
    assert len(digests) == 1, "the same bits at 1 and 2 ranks"
    assert text.count(" of 360 |") == 3
    assert text in done.stdout
    written = (folder / "exact-2" / "metrics.jsonl").stat().st_mtime_ns
    again = stages(tmp_path)
    assert again.stdout.startswith("\n`python pretrain.py"), "nothing was missing"
    assert (folder / "exact-2" / "metrics.jsonl").stat().st_mtime_ns == written
