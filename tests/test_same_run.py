"""The promise, end to end: the same run at any number of ranks, in other micro-batches and by other
ways to synchronise; and everything a run leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.ranks import words
from tests.runs import (
    GPT_COMPONENTS,
    NOISY,
    TINY_CANDIDATES,
    TINY_CNN,
    TINY_COMPONENTS,
    TINY_GPT,
    TINY_PREFIX,
    TINY_SYMBOLS,
    TINY_TRM,
    Once,
    Result,
    assert_same_run,
    learned,
    train,
)

slow = pytest.mark.slow
RUNS = {
    # of boards that it soon solves, so that it halts early
    "trm": [
        *TINY_TRM,
        *words("data.embedded.blanks=1 grad_clip=1.0 max_steps=30"),
        "eval_save_outputs=[inputs,answer]",
    ],
    # noise in each pass amplifies rounding a thousandfold every three steps from step 34 on
    "trm, noisy": [*TINY_TRM, *NOISY, "max_steps=30"],
    # AdamATan2 would not notice a gradient four times too large
    "trm, sgd": [*TINY_TRM, *words("optim=sgd lr=0.1 epochs=8 eval_interval=8")],
    "trm, ragged puzzles": [
        *TINY_TRM,
        *words("data_path=RAGGED epochs=16 eval_interval=8 puzzle_emb_lr=1e-2"),
    ],
    "candidates": [*TINY_CANDIDATES, "arch.num_heads=null"],
    "symbols": TINY_SYMBOLS,
    "cnn": [*TINY_CNN, "max_steps=24", "ema=true"],
    "gpt": [*TINY_GPT, "ema=true", "ema_rate=0.9"],
    # embeddings tied, activations computed again
    "gpt, tied": [
        *TINY_GPT,
        *words("arch.tied=true arch.recompute=true arch.dropout=0.2 grad_clip=0.5 ema=true"),
    ],
    "components": [*TINY_COMPONENTS, "arch.target=TMS"],
    "components of a gpt": [*GPT_COMPONENTS, "arch.target=GPT"],
    "latent": [*TINY_PREFIX, "arch.readers=READERS"],
    "latent, of states": [*TINY_PREFIX, "arch.readers=READERS", "arch.encoder.states=true"],
}
# on a busy machine one rank may compile a minute longer than the other
COMPILED = "compile=true timeout_s=300"
OTHERWISE = [
    ("trm", 3, ""),
    pytest.param("trm", 2, "", marks=slow),
    pytest.param("trm", 4, "", marks=slow),
    ("trm", 2, "sync=fsdp micro_batch_size=6"),
    ("gpt", 2, "micro_batch_size=3"),
    *(
        pytest.param(*case, marks=[slow, pytest.mark.timeout(420)])
        for case in (
            ("trm", 2, "sync=ddp micro_batch_size=3 sync.static_graph=true"),
            ("trm", 4, "sync=ddp"),
            ("trm", 3, "sync=ddp micro_batch_size=3"),
            ("trm", 1, "sync=fsdp"),
            ("trm", 3, "sync=fsdp"),
            ("trm, noisy", 3, "eval_batch_size=5 micro_batch_size=6"),
            ("trm, sgd", 3, "micro_batch_size=3"),
            ("trm, ragged puzzles", 3, ""),
            ("candidates", 3, ""),
            ("symbols", 3, "micro_batch_size=3"),
            ("cnn", 3, ""),
            ("cnn", 3, "sync=ddp micro_batch_size=4"),
            ("cnn", 2, "sync=fsdp micro_batch_size=4"),
            ("gpt", 3, "micro_batch_size=3"),
            ("gpt, tied", 2, "sync=ddp sync.find_unused_parameters=true micro_batch_size=3"),
            ("gpt, tied", 3, "sync=fsdp sync.reshard_after_forward=false"),
            ("gpt, tied", 2, f"sync=ddp {COMPILED}"),
            ("gpt, tied", 2, f"sync=fsdp {COMPILED}"),
            ("components", 3, "micro_batch_size=12"),
            ("components", 3, "sync=ddp sync.find_unused_parameters=true micro_batch_size=12"),
            ("components", 2, "sync=fsdp"),
            ("components of a gpt", 2, "micro_batch_size=6"),
            ("components of a gpt", 3, "micro_batch_size=6"),
            ("latent", 3, "micro_batch_size=6"),
            ("latent", 2, "sync=ddp"),
            ("latent", 2, "sync=fsdp"),
            ("latent", 2, "arch.devices=2"),
            ("latent, of states", 3, "micro_batch_size=3"),
        )
    ),
]


@pytest.fixture(scope="module")
def arguments(request: pytest.FixtureRequest) -> Callable[[str], list[str]]:
    """What starts a run by its name; it trains a target first where the run needs one."""
    needed = {"=TMS": "tms_target", "=GPT": "gpt_target", "=READERS": "readers"}
    needed["=RAGGED"] = "ragged"

    def filled(word: str) -> str:
        for end, fixture in needed.items():
            if word.endswith(end):
                return word.replace(end, f"={request.getfixturevalue(fixture)}")
        return word

    return lambda name: [filled(word) for word in RUNS[name]]


@pytest.mark.parametrize(("name", "ranks", "otherwise"), OTHERWISE)
def test_it_is_the_same_run(
    name: str, ranks: int, otherwise: str, arguments: Any, once: Once, tmp_path: Path
) -> None:
    line = arguments(name)
    one = once(*line)
    other = train(tmp_path / "run", *line, *words(otherwise), ranks=ranks, timeout=400)
    assert_same_run(one, other)
    assert evaluations(one) == evaluations(other), "the report page shows the same"


def evaluations(run: Result) -> dict[str, str]:
    """The texts that evaluations have left, for the report page and for readers."""
    files = [file for file in (run.directory / "evaluations").rglob("*") if file.is_file()]
    texts = [file for file in sorted(files) if file.suffix in (".json", ".tsv", ".csv", ".txt")]
    return {str(file.relative_to(run.directory)): file.read_text() for file in texts}


@pytest.fixture
def trm(once: Once) -> Result:
    return once(*RUNS["trm"])


def test_the_tiny_run_exercises_what_it_should(trm: Result) -> None:
    """Halting early, exploring, several puzzles' worth of carry: else the comparisons above show
    little.
    """
    steps = trm.series("train/steps")
    assert sum(value < 4 for value in steps) > 6, steps
    assert sum(value != int(value) for value in steps) > 4, (
        "slots of one step halt at different times"
    )
    assert trm.series("train/q_continue_loss")
    start, end = trm.series("train/lm_loss")[0], trm.series("train/lm_loss")[-1]
    assert end < start - 0.05
    assert trm.weights()["model.inner.puzzle_emb.weights"].abs().max() > 1e-3
    assert any(name.endswith(".scene.json") for name in evaluations(trm))


@slow
@pytest.mark.parametrize(
    ("name", "share"), [("gpt", 0.8), ("components", 0.9), ("trm, ragged puzzles", 1.0)]
)
def test_other_tiny_runs_learn(name: str, share: float, arguments: Any, once: Once) -> None:
    run = once(*arguments(name))
    losses = run.series("train/loss")
    assert losses[-1] < share * losses[0]
    assert evaluations(run)
    if "ragged" in name:
        table = run.weights()["model.inner.puzzle_emb.weights"]
        assert (table.abs().amax(1) > 0).sum() > 20, "many rows were trained"


@slow
def test_the_same_command_gives_the_same_bits(trm: Result, tmp_path: Path) -> None:
    again = train(tmp_path / "run", *RUNS["trm"], "num_workers=2")
    assert_close(again.weights(), trm.weights(), rtol=0, atol=0)


def test_a_run_leaves_its_files(trm: Result) -> None:
    names = {path.name for path in trm.directory.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints"} <= names
    config = yaml.safe_load((trm.directory / "config.yaml").read_text())
    assert config["global_batch_size"] == 24
    assert config["arch"]["puzzle_emb_ndim"] == 16, "interpolations are resolved"
    # of a step in which no slot halted there is no accuracy
    row = {name: value for row in trm.rows for name, value in row.items()}
    for name in words("lm_loss accuracy exact_accuracy q_halt_accuracy q_halt_loss steps lr"):
        assert math.isfinite(row[f"train/{name}"]), name
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


@slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_leaving_early_gives_the_same_numbers_at_any_number_of_ranks(
    trm: Result, ranks: int, tmp_path: Path
) -> None:
    asked = words(
        f"eval_only=true checkpoint={trm.directory} arch.eval_halt=true eval_batch_size=5"
    )
    line = [*TINY_TRM, *asked]
    one, many = (train(tmp_path / str(number), *line, ranks=number) for number in (1, ranks))
    assert learned(one) == learned(many)
    assert one.rows[-1]["eval/steps"] < 4


def test_eval_only_repeats_the_evaluation_on_two_ranks(trm: Result, tmp_path: Path) -> None:
    arguments = ["eval_only=true", f"checkpoint={trm.directory}"]
    again = train(tmp_path / "run", *arguments, "sync=ddp", ranks=2)
    assert again.series("eval/accuracy") == trm.series("eval/accuracy")[-1:]
    no_length = ["epochs=null", "max_steps=null"]
    puzzle = "data.puzzle=12..3.1.2.4..32."
    raw = train(tmp_path / "raw", *arguments, "ema=false", *no_length, puzzle)
    assert raw.series("eval/lm_loss") != again.series("eval/lm_loss"), (
        "averaged and raw weights must differ"
    )
    (answers,) = raw.directory.glob("evaluations/step_*/puzzle/answers.csv")
    assert "12..3.1.2.4..32." in answers.read_text()


@slow
def test_cnn_learns_the_digits(tmp_path: Path) -> None:
    accuracy = train(tmp_path / "run", "experiment=digits", timeout=200).series("eval/accuracy")
    assert len(accuracy) == 5
    assert accuracy[-1] >= 0.93
