"""The promise, end to end: the same run at any number of ranks, and everything a run leaves
behind.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.runs import (
    NOISY,
    TINY_CNN,
    TINY_SUDOKU,
    TINY_TRM,
    Result,
    assert_same_run,
    learned,
    train,
)


@pytest.fixture(scope="module")
def trm(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The tiny TRM on one rank."""
    return train(
        tmp_path_factory.mktemp("trm") / "run", *TINY_TRM, "eval_save_outputs=[inputs,answer]"
    )


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The digit classifier on one rank."""
    return train(tmp_path_factory.mktemp("cnn") / "run", *TINY_CNN, "max_steps=24")


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_trm_is_the_same_run_at_any_number_of_ranks(
    trm: Result, ranks: int, tmp_path: Path
) -> None:
    other = train(tmp_path / "run", *TINY_TRM, ranks=ranks)
    assert_same_run(trm, other)
    assert scenes(trm) == scenes(other) != {}, "the report page shows the same boards"


@pytest.mark.slow
def test_noise_is_the_same_at_three_ranks_in_other_batches(tmp_path: Path) -> None:
    noisy = [*TINY_TRM, *NOISY]
    one = train(tmp_path / "one", *noisy)
    other = train(tmp_path / "run", *noisy, "eval_batch_size=5", "micro_batch_size=6", ranks=3)
    assert_same_run(one, other)
    assert scenes(one) == scenes(other) != {}, "the report page shows the same boards"


@pytest.mark.slow
def test_guessing_is_the_same_run_at_three_ranks(tmp_path: Path) -> None:
    one = train(tmp_path / "one", *TINY_SUDOKU)
    other = train(tmp_path / "run", *TINY_SUDOKU, ranks=3)
    assert_same_run(one, other)
    assert scenes(one) == scenes(other) != {}, "the report page shows the same boards"


def scenes(run: Result) -> dict[str, str]:
    """Returns the files that evaluations have left for the report page."""
    files = sorted((run.directory / "evaluations").rglob("*.scene.json"))
    return {str(file.relative_to(run.directory)): file.read_text() for file in files}


@pytest.mark.slow
def test_ragged_puzzles_with_many_ids_are_the_same_run(ragged: Path, tmp_path: Path) -> None:
    arguments = [
        *TINY_TRM,
        f"data_path={ragged}",
        "epochs=16",
        "eval_interval=8",
        "puzzle_emb_lr=1e-2",
    ]
    one = train(tmp_path / "one", *arguments)
    assert_same_run(one, train(tmp_path / "run", *arguments, ranks=3))
    assert (one.weights()["model.inner.puzzle_emb.weights"].abs().amax(1) > 0).sum() > 20, (
        "many rows were trained"
    )


@pytest.mark.slow
def test_cnn_is_the_same_run_at_three_ranks(cnn: Result, tmp_path: Path) -> None:
    other = train(tmp_path / "run", *TINY_CNN, "max_steps=24", ranks=3)
    assert_same_run(cnn, other)
    assert scenes(cnn) == scenes(other) != {}, "the report page shows the same mistakes"


@pytest.mark.slow
def test_neither_ranks_nor_micro_batches_change_the_scale_of_gradients(tmp_path: Path) -> None:
    """AdamATan2 would not notice a gradient four times too large; SGD does."""
    sgd = [*TINY_TRM, "optim=sgd", "lr=0.1", "epochs=8", "eval_interval=8"]
    one = train(tmp_path / "one", *sgd)
    assert_same_run(one, train(tmp_path / "run", *sgd, "micro_batch_size=3", ranks=3))


def test_the_tiny_run_exercises_what_it_should(trm: Result) -> None:
    """Halting early, exploring, several puzzles' worth of carry: else the comparisons above show
    little.
    """
    steps = trm.series("train/steps")
    assert sum(value < 4 for value in steps) > 20, steps
    assert sum(value != int(value) for value in steps) > 10, (
        "slots of one step halt at different times"
    )
    assert trm.series("train/q_continue_loss")
    start, end = trm.series("train/lm_loss")[0], trm.series("train/lm_loss")[-1]
    assert end < start - 0.05
    assert trm.weights()["model.inner.puzzle_emb.weights"].abs().max() > 1e-3


@pytest.mark.slow
def test_the_same_command_gives_the_same_bits(trm: Result, tmp_path: Path) -> None:
    again = train(tmp_path / "run", *TINY_TRM, "num_workers=2")
    for name, tensor in trm.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_a_run_leaves_its_files(trm: Result) -> None:
    names = {path.name for path in trm.directory.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints"} <= names
    config = yaml.safe_load((trm.directory / "config.yaml").read_text())
    assert config["global_batch_size"] == 24
    assert config["arch"]["puzzle_emb_ndim"] == 16, "interpolations are resolved"
    # of a step in which no slot halted there is no accuracy
    row = {name: value for row in trm.rows for name, value in row.items()}
    for name in (
        "train/lm_loss",
        "train/accuracy",
        "train/exact_accuracy",
        "train/q_halt_accuracy",
        "train/q_halt_loss",
        "train/steps",
        "train/lr",
    ):
        assert math.isfinite(row[name]), name
    for name in ("examples_per_s", "tokens_per_s", "step_ms", "data_wait_ms", "all_reduce_ms"):
        assert row[f"speed/{name}"] >= 0
    assert row["memory/peak_bytes"] > 1e6
    assert "100%  step " in trm.stdout, "where no terminal is, a line now and then"
    assert "answer" in trm.stdout, "one held-out example is shown"
    assert str(trm.directory) in trm.stdout


def test_evaluation_sees_every_example_once(trm: Result) -> None:
    (saved,) = trm.directory.glob("*_preds.0.safetensors")
    outputs = load_file(saved)
    assert outputs["index"].tolist() == list(range(37))
    assert outputs["answer"].shape == outputs["inputs"].shape == (37, 16)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_leaving_early_gives_the_same_numbers_at_any_number_of_ranks(
    trm: Result, ranks: int, tmp_path: Path
) -> None:
    arguments = [
        *TINY_TRM,
        "eval_only=true",
        f"checkpoint={trm.directory}",
        "arch.eval_halt=true",
        "eval_batch_size=5",
    ]
    one, many = (train(tmp_path / str(number), *arguments, ranks=number) for number in (1, ranks))
    assert learned(one) == learned(many)
    assert one.rows[-1]["eval/steps"] < 4


def test_eval_only_repeats_the_evaluation_on_two_ranks(trm: Result, tmp_path: Path) -> None:
    arguments = ["eval_only=true", f"checkpoint={trm.directory}"]
    again = train(tmp_path / "run", *arguments, "sync=ddp", ranks=2)
    assert again.series("eval/accuracy") == trm.series("eval/accuracy")[-1:]
    raw = train(tmp_path / "raw", *arguments, "ema=false")
    assert raw.series("eval/lm_loss") != again.series("eval/lm_loss"), (
        "averaged and raw weights must differ"
    )
    asked = train(tmp_path / "asked", *arguments, "data.puzzle=12..3.1.2.4..32.")
    (answers,) = asked.directory.glob("evaluations/step_*/puzzle/answers.csv")
    assert "12..3.1.2.4..32." in answers.read_text()


@pytest.mark.slow
def test_cnn_learns_the_digits(tmp_path: Path) -> None:
    accuracy = train(tmp_path / "run", "experiment=digits", timeout=200).series("eval/accuracy")
    assert len(accuracy) == 5
    assert accuracy[-1] >= 0.93
