"""Latent prefixes end to end: the same run at any number of ranks and through interruptions, and
what evaluations leave.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.documented import commands
from tests.ranks import ROOT, check_ended_well, run_line
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
from tests.steps import steps_of, trainer_on
from utils.ranks.distributed import Dist

slow = pytest.mark.slow
LOSSES = ["arch.loss.hidden=0.2"]


def models(folders: list[str]) -> str:
    return f"arch.models=[{','.join(folders)}]"


@pytest.fixture(scope="module")
def alone(reader_folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(
        tmp_path_factory.mktemp("latent") / "run", *TINY_PREFIX, *LOSSES, models(reader_folders)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ["micro_batch_size=6"]),
        (2, ["sync=ddp"]),
        (2, ["sync=fsdp"]),
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


@pytest.mark.slow
def test_a_run_leaves_answers_and_pictures(alone: Result, reader_folders: list[str]) -> None:
    losses = alone.series("train/loss")
    assert losses[-1] < 0.9 * losses[0], "it learns nothing: the other tests show little"
    folder = alone.directory / "evaluations/step_23/test"
    assert {"answers.json", "answers.txt"} <= {path.name for path in folder.iterdir()}
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


TINY_LONG = [
    "arch.forward_dtype=float32",
    "data.stories.train=24",
    "data.stories.test=4",
    "arch.encoder={width:16,heads:2}",
    "arch.adapter_width=16",
    "arch.gist_width=16",
    "arch.spread=2",
]


def test_the_recipe_for_longer_texts_asks_about_every_fact(
    reader_folders: list[str], tmp_path: Path
) -> None:
    trainer = trainer_on(
        Dist(),
        tmp_path / "run",
        "experiment=latent_long",
        "data.stories.facts=5",
        *TINY_LONG,
        models(reader_folders),
    )
    batch = trainer.source.train_batch(0, 0)
    assert batch["context"].shape == (2, 5 * len("cupboardab47 ") - 1)
    assert batch["question_1"].shape[:2] == (2, 5)
    assert (batch["answer_1"][..., 0] >= 0).all()
    trained = {name: tensor.clone() for name, tensor in trainer.objective.state_dict().items()}
    for step in steps_of(trainer, 1):
        step()
    now = trainer.objective.state_dict()
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, now[name])}
    assert {name.split(".")[1] for name in moved} == {"encoder", "adapters", "gist"}


def own_question_lines() -> list[list[str]]:
    """Those in the README that train a model, publish it, and train latents for it."""
    lines = commands(ROOT / "models/latent/README.md")
    return [
        list(each.words[1:]) for each in lines if re.search("run_name=reader|llama-r", str(each))
    ]


@slow
@pytest.mark.timeout(600)
def test_a_published_folder_and_a_file_of_ones_own_give_the_table(tmp_path: Path) -> None:
    """The README's lines as they stand, with fewer steps."""
    (tmp_path / "pretrain.py").symlink_to(ROOT / "pretrain.py")
    (tmp_path / "data").symlink_to(ROOT / "data")
    first, export, last = own_question_lines()
    short = ["max_steps=6", "eval_every_steps=6", "wandb.mode=disabled"]
    for line in (first, last):
        if line is last:
            subprocess.run(
                [sys.executable, *export],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                check=True,
                timeout=60,
            )
        done = check_ended_well(run_line([*line[1:], *short], tmp_path, limit_s=250))
    assert {file.name for file in (tmp_path / "llama-reader").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert json.loads((tmp_path / "llama-reader/config.json").read_text())["model_type"] == "llama"
    assert "answers to 3 questions, from" in done[0].stdout
    assert "its first bytes, as many as the latents        40" in done[0].stdout
