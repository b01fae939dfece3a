"""Latent prefixes end to end: the same run at any number of ranks and through interruptions, and
what evaluations leave.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.latent.answers import LABEL
from tests.ranks import run_ranks
from tests.runs import (
    FLOAT32,
    QUIET,
    TINY_PREFIX,
    Result,
    assert_same_run,
    digest,
    learned,
    stopped,
    train,
)
from utils.latent import ANSWER_INPUTS

slow = pytest.mark.slow
LOSSES = [f"arch.loss.{name}=0.5" for name in ("first", "first_k", "distill", "align", "scale")]


def models(folders: list[str]) -> str:
    return f"arch.models=[{','.join(folders)}]"


@pytest.fixture(scope="module")
def alone(reader_folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(
        tmp_path_factory.mktemp("latent") / "run", *TINY_PREFIX, *LOSSES, models(reader_folders)
    )


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ["micro_batch_size=6"]),
        pytest.param(2, [], marks=slow),
        pytest.param(4, [], marks=slow),
        pytest.param(2, ["sync=ddp"], marks=slow),
        pytest.param(2, ["sync=fsdp"], marks=slow),
    ],
)
def test_the_number_of_ranks_changes_nothing(
    ranks: int, more: list[str], alone: Result, reader_folders: list[str], tmp_path: Path
) -> None:
    other = train(
        tmp_path / "run", *TINY_PREFIX, *LOSSES, *more, models(reader_folders), ranks=ranks
    )
    assert_same_run(alone, other)
    files = [
        (run.directory / "evaluations/step_23/test/answers.json").read_text()
        for run in (alone, other)
    ]
    assert json.loads(files[0]) == pytest.approx(json.loads(files[1]))


def test_a_run_leaves_answers_and_pictures(alone: Result, reader_folders: list[str]) -> None:
    losses = alone.series("train/loss")
    assert losses[-1] < 0.9 * losses[0], "it learns nothing: the other tests show little"
    folder = alone.directory / "evaluations/step_23/test"
    assert {"answers.json", "answers.txt", "answers.png", "answers_over_time.png"} <= {
        path.name for path in folder.iterdir()
    }
    headline, empty, *table = (folder / "answers.txt").read_text().splitlines()
    assert headline.startswith("latents, float16, against the best text of 48 bytes: model 0: ")
    assert not empty
    assert table[0].startswith("answers to 19 questions, from")
    assert [line[:LABEL].strip() for line in table[1:12]] == [
        "latents, float16",
        "latents, int8",
        "latents, int4",
        "the whole text",
        "its first tokens, one for each position",
        "its first bytes, as many as the latents",
        "nothing",
        "another text's latents",
        "mean latents",
        "the whole text, compressed with deflate",
        "what the text really holds, 48 bits",
    ]
    assert "cupboard" in table[12]
    bars = json.loads((folder / "answers.scene.json").read_text())
    assert bars["x"]["values"] == [line[:LABEL].strip() for line in table[1:10]]
    for number, model in enumerate(bars["series"]):
        right = [alone.rows[-1][f"eval/exact/{way}/{number}"] for way in ANSWER_INPUTS]
        assert model["values"] == pytest.approx(right, rel=1e-4)
        for low, value, high in zip(model["low"], model["values"], model["high"], strict=True):
            assert 0 <= low <= value <= high <= 1
    samples = json.loads((folder / "answers_samples.scene.json").read_text())["items"]
    assert [len(each["answers"]) for each in samples] == [18] * 5
    last = alone.rows[-1]
    assert last["eval/bytes/text"] == 38
    assert {
        "eval/exact/float16/0",
        "eval/f1/mean/1",
        "eval/bits/0",
        "eval/exact_match",
    } <= last.keys()
    held = alone.weights()
    assert not any("frozen" in name for name in held)
    meta = json.loads(next(alone.directory.glob("checkpoints/step_*/meta.json")).read_text())
    assert [part["path"] for part in meta["frozen"].values()] == reader_folders


@slow
def test_exact_runs_are_equal_to_the_bit_and_go_on_at_other_ranks(
    reader_folders: list[str], tmp_path: Path
) -> None:
    arguments = [
        *TINY_PREFIX,
        *LOSSES,
        models(reader_folders),
        *FLOAT32,
        "exact=true",
        "log_interval=4",
    ]
    one = train(tmp_path / "one", *arguments)
    two = train(tmp_path / "two", *arguments, ranks=2)
    assert digest(two.directory) == digest(one.directory)
    stopped(tmp_path / "run", *arguments, ranks=4)
    again = train(tmp_path / "run", *arguments, ranks=2)
    assert digest(again.directory) == digest(one.directory)
    assert learned(again) == learned(one)


@slow
def test_models_are_made_first(tmp_path: Path) -> None:
    """By their arguments; another run that needs them finds them."""
    first = (
        "experiment=latent_reader max_steps=3 data.stories.train=16 data.stories.facts=3"
        " arch.hidden_size=16 checkpoint_path={}"
    )
    given = (
        f"arch.models=['{first.format(tmp_path / 'a')}','{first.format(tmp_path / 'b')}"
        " data.tokenizer=bpe:280']"
    )
    run = train(tmp_path / "run", *TINY_PREFIX, *FLOAT32, given, ranks=2)
    assert (tmp_path / "a" / "checkpoints" / "latest").read_text() == "step_3\n"
    assert f"- {tmp_path}/b" in (run.directory / "config.yaml").read_text()
    done = run_ranks(
        1,
        ["pretrain.py", *QUIET, *TINY_PREFIX, *FLOAT32, given, f"checkpoint_path={tmp_path}/run"],
        60,
    )[0]
    assert "is finished, 23 steps" in done.stdout
