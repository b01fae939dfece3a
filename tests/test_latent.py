"""Latent prefixes end to end: what a run saves, and published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import check_ended_well, run_module, words
from tests.runs import TINY_PREFIX, Once, train


def test_a_run_learns_and_saves_the_map_alone(gpt_target: Path, once: Once) -> None:
    alone = once(*TINY_PREFIX, f"arch.target={gpt_target}")
    last = alone.rows[-1]
    assert last["eval/loss"] < last["eval/loss_last"] - 0.01, "trained, against untrained"
    names = alone.weights().keys()
    assert {name.split(".")[1] for name in names} == {"map"}
    meta = json.loads(next(alone.directory.glob("checkpoints/step_*/meta.json")).read_text())
    (frozen,) = meta["frozen"].values()
    assert frozen["path"] == str(gpt_target / "checkpoints/step_3")


@pytest.mark.slow
def test_a_published_model_reads_latents_of_ones_own_texts(
    gpt_target: Path, tmp_path: Path
) -> None:
    published, texts = tmp_path / "llama", tmp_path / "texts"
    check_ended_well(run_module(1, "models.language.llama", str(gpt_target), str(published)))
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text(f"text {number}, of some length\n" * 9)
    own = words(f"data=stream data_path={texts} arch.target={published}")
    own.append(f"data.tokenizer={published / 'tokenizer.json'}")
    tiny = [each for each in TINY_PREFIX if "embedded" not in each and each != "data=tokens"]
    assert "eval/share" in train(tmp_path / "run", *tiny, *own).rows[-1]
