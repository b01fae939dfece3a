"""Latent prefixes end to end: the same run at any number of ranks and through interruptions, and
what a run saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import check_ended_well, run_module
from tests.runs import (
    FLOAT32,
    TINY_PREFIX,
    Result,
    assert_same_run,
    digest,
    learned,
    stopped,
    train,
)


@pytest.fixture(scope="module")
def arguments(gpt_target: Path) -> list[str]:
    return [*TINY_PREFIX, f"arch.target={gpt_target}"]


@pytest.fixture(scope="module")
def alone(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("latent") / "run", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), [(3, ["micro_batch_size=6"]), (2, ["sync=ddp"]), (2, ["sync=fsdp"])]
)
def test_the_number_of_ranks_changes_nothing(
    ranks: int, more: list[str], alone: Result, arguments: list[str], tmp_path: Path
) -> None:
    assert_same_run(alone, train(tmp_path / "run", *arguments, *more, ranks=ranks))


def test_a_run_learns_and_saves_the_map_alone(alone: Result, gpt_target: Path) -> None:
    last = alone.rows[-1]
    assert last["eval/loss"] < last["eval/loss_last"] - 0.01, "trained, against untrained"
    names = alone.weights().keys()
    assert {name.split(".")[1] for name in names} == {"map"}
    meta = json.loads(next(alone.directory.glob("checkpoints/step_*/meta.json")).read_text())
    (frozen,) = meta["frozen"].values()
    assert frozen["path"] == str(gpt_target / "checkpoints/step_3")


@pytest.mark.slow
def test_exact_runs_are_equal_to_the_bit_and_go_on_at_other_ranks(
    arguments: list[str], tmp_path: Path
) -> None:
    arguments = [*arguments, *FLOAT32, "exact=true", "log_interval=4"]
    one = train(tmp_path / "one", *arguments)
    stopped(tmp_path / "run", *arguments, ranks=2)
    again = train(tmp_path / "run", *arguments, ranks=2)
    assert digest(again.directory) == digest(one.directory)
    assert learned(again) == learned(one)


@pytest.mark.slow
def test_a_published_model_reads_latents_of_ones_own_texts(
    gpt_target: Path, tmp_path: Path
) -> None:
    published, texts = tmp_path / "llama", tmp_path / "texts"
    check_ended_well(run_module(1, "models.language.llama", str(gpt_target), str(published)))
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text(f"text {number}, of some length\n" * 9)
    own = [
        "data=stream",
        f"data_path={texts}",
        f"data.tokenizer={published / 'tokenizer.json'}",
        f"arch.target={published}",
    ]
    tiny = [each for each in TINY_PREFIX if "embedded" not in each and each != "data=tokens"]
    assert "eval/share" in train(tmp_path / "run", *tiny, *own).rows[-1]
