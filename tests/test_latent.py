"""Latent prefixes end to end: what a run saves, published readers, several devices, facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import check_ended_well, run_module, words
from tests.runs import EXACT, TINY_PREFIX, Once, assert_same_bits, train


def test_a_run_learns_and_saves_no_reader(readers: str, once: Once) -> None:
    run = once(*TINY_PREFIX, f"arch.readers={readers}")
    last = run.rows[-1]
    assert last["eval/loss"] < last["eval/loss_last"] - 0.01, "trained, against untrained"
    parts = {".".join(name.split(".")[:2]) for name in run.weights()}
    assert {part for part in parts if part.startswith("model")} == {
        "model.encoder",
        "model.adapters",
    }
    meta = json.loads(next(run.directory.glob("checkpoints/step_*/meta.json")).read_text())
    frozen = [part["path"] for part in meta["frozen"].values()]
    assert frozen == [f"{folder}/checkpoints/step_3" for folder in readers.strip("[]").split(",")]
    table = next(run.directory.glob("evaluations/*/**/shares.scene.json"))
    rows = json.loads(table.read_text())["rows"]
    assert [row[0] for row in rows] == [0] * 11 + [1] * 11


@pytest.mark.slow
def test_exact_runs_have_the_same_bits_however_readers_lie_on_devices(
    readers: str, once: Once, tmp_path: Path
) -> None:
    """Each reader with the encoder, or on a separate device; on one rank and on two."""
    line = [*TINY_PREFIX, f"arch.readers={readers}", *EXACT]
    one = once(*line)
    for number, (ranks, devices) in enumerate([(1, 2), (2, 1), (2, 2)]):
        other = train(tmp_path / str(number), *line, f"arch.devices={devices}", ranks=ranks)
        assert_same_bits(other, one)


@pytest.mark.slow
def test_a_published_model_reads_latents_of_ones_own_texts(
    gpt_target: Path, tmp_path: Path
) -> None:
    published, texts, tokens = tmp_path / "llama", tmp_path / "texts", tmp_path / "tokens"
    check_ended_well(run_module(1, "models.language.llama", str(gpt_target), str(published)))
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text(f"text {number}, of some length\n" * 9)
    build = f"--input {texts} --tokenizer bytes --output-dir {tokens}"
    check_ended_well(run_module(1, "data.build.tokens", *words(build)))
    own = [f"data_path={tokens}", f"arch.readers=[{published}]", "max_steps=3"]
    assert "eval/share" in train(tmp_path / "run", *TINY_PREFIX, *own).rows[-1]
