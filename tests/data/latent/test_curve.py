"""The picture of exact match against bytes: which evaluations it reads, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.latent.curve import main


def run_of(folder: Path, text: int, size: int, latents: float, cut: float) -> Path:
    """A run whose last evaluation, of two models, has these figures; an earlier one has others."""
    folder.mkdir()
    (folder / "config.yaml").write_text("arch: {send: int4}\n")
    row = {
        "exact/int4/0": latents - 0.1, "exact/int4/1": latents + 0.1, "exact/int8/0": 0.99,
        "exact/cut/0": cut, "exact/cut/1": cut, "exact/text/0": 1.0, "exact/text/1": 0.9,
        "bytes/int4": size, "bytes/int8": 2 * size, "bytes/text": text, "bytes/cut": size,
        "bytes/deflated_size": text / 2,
    }  # fmt: skip
    for step, figures in ((900, dict.fromkeys(row, 0.0)), (1600, row)):
        file = folder / f"evaluations/step_{step}/test/answers.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(figures))
    return folder


def test_runs_and_sweeps_are_drawn_by_length_of_text_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    jobs = [run_of(tmp_path / "a", 311, 128, 0.8, 0.4), run_of(tmp_path / "b", 311, 64, 0.5, 0.2)]
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    listed = [
        {"number": number, "overrides": f"seed={number}", "directory": str(job)}
        for number, job in enumerate(jobs, start=1)
    ]
    (sweep / "jobs.json").write_text(json.dumps(listed))
    alone = run_of(tmp_path / "c", 155, 64, 0.7, 0.3)
    picture = tmp_path / "curve.png"
    assert main([str(sweep), str(alone), str(picture)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "".join(f"{cell:>17}" for cell in row)
        for row in (
            ("text", "bytes", "deflate", "latents", "its first bytes", "whole"),
            ("155", "64", "78", "70.0%", "30.0%", "95.0%"),
            ("311", "64", "156", "50.0%", "20.0%", "95.0%"),
            ("311", "128", "156", "80.0%", "40.0%", "95.0%"),
        )
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_latents_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "x.png")]) == 2
    assert f"{tmp_path}: holds no evaluation of latents" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
