"""The same command continues its run, and the continued run is the undisturbed one: known by
digests and logged metrics.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import words
from tests.runs import (
    EXACT,
    INTERRUPTED,
    STOPPED,
    TINY_CANDIDATES,
    TINY_CNN,
    TINY_GPT,
    TINY_PREFIX,
    TINY_SYMBOLS,
    Once,
    Result,
    assert_same_bits,
    digest,
    faulty,
    status,
    stopped,
    train,
)
from utils.checkpoint import reader


def test_a_stopped_run_goes_on_to_the_same_bits(undisturbed: Result, tmp_path: Path) -> None:
    (done,) = stopped(tmp_path / "run", *INTERRUPTED)
    assert "SIGTERM after step 10: stopped; the same command goes on from there" in done.stderr
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["step"], ended["exit_status"]) == ("stopped", 10, STOPPED)
    assert_same_bits(train(tmp_path / "run", *INTERRUPTED), undisturbed)
    assert status(tmp_path / "run")["state"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is moved aside"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "before", "after"),
    [
        *(("trm", *ranks) for ranks in ((2, 1), (4, 1), (4, 2), (4, 8))),
        ("gpt", 4, 2),
        ("gpt, documents", 4, 2),
        ("latent", 2, 1),
        ("symbols", 2, 1),
        ("candidates", 2, 1),
    ],
)
def test_exact_runs_go_on_at_any_number_of_ranks(
    what: str, before: int, after: int, readers: str, once: Once, tmp_path: Path
) -> None:
    line = {
        "trm": INTERRUPTED,
        "gpt": [*TINY_GPT, "log_interval=4"],
        "gpt, documents": [*TINY_GPT, "log_interval=4", "data.documents=true"],
        "latent": [*TINY_PREFIX, "log_interval=4", f"arch.readers={readers}"],
        "symbols": [*TINY_SYMBOLS, "log_interval=4"],
        "candidates": [*TINY_CANDIDATES, "log_interval=4"],
    }[what]
    stopped(tmp_path / "run", *line, *EXACT, ranks=before)
    again = train(tmp_path / "run", *line, *EXACT, ranks=after, timeout=200)
    assert_same_bits(again, once(*line, *EXACT))


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adadelta", "adamw", "muon"])
def test_every_optimizer_remembers(optim: str, tmp_path: Path) -> None:
    keys = words(f"optim={optim} lr=1e-2 max_steps=6 num_workers=0 checkpoint_interval=3 keep=null")
    arguments = [*(INTERRUPTED if optim == "muon" else TINY_CNN), *keys]
    one = train(tmp_path / "run", *arguments)
    two = train(tmp_path / "two", *arguments, f"resume={tmp_path}/run/checkpoints/step_3")
    assert two.rows[0]["step"] == 4
    assert digest(two.directory) == digest(one.directory)


@pytest.mark.slow
def test_evaluation_that_was_cut_short_is_made_up_for(tmp_path: Path) -> None:
    arguments = [*INTERRUPTED, "epochs=24", "eval_interval=6", "max_steps=20", "eval_batch_size=4"]
    one = train(tmp_path / "undisturbed", *arguments)
    assert len(one.series("eval/accuracy")) == 2
    done = faulty(tmp_path / "run", "SIGUSR1@predict", 0, 3, *arguments)
    assert done[0].returncode == 138, done[0].stderr
    assert status(tmp_path / "run")["state"] == "requeue"
    assert_same_bits(train(tmp_path / "run", *arguments), one)


@pytest.mark.slow
def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    """The best by a metric that grows from step to step is the first; by one that falls, the
    last.
    """
    best_of = "keep=1 objective_metric=-eval/lm_loss"
    keys = words(f"epochs=24 eval_interval=4 max_steps=60 lr=1e-3 {best_of}")
    arguments = [*INTERRUPTED, *keys]
    run = train(tmp_path / "run", *arguments)
    losses = {row["step"]: row["eval/lm_loss"] for row in run.rows if "eval/lm_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").read_text() == f"step_{best}\n"
    assert {path.name for path in checkpoints.glob("step_*")} == {f"step_{best}", "step_60"}
    # another metric is not compared with the old one's value
    again = train(tmp_path / "run", *arguments, "max_steps=64", "objective_metric=eval/accuracy")
    assert (checkpoints / "best").read_text() == "step_64\n"
    assert again.series("eval/accuracy")[-1] < losses[best], "else it would count in any case"


def test_a_checkpoint_has_the_results_of_no_step_but_its_own(tmp_path: Path) -> None:
    keys = words("max_steps=4 eval_every_steps=2 checkpoint_interval=1 keep=null num_workers=0")
    folder = train(tmp_path / "run", *TINY_CNN, "epochs=null", *keys).directory / "checkpoints"
    metas = [reader.read_meta(folder / f"step_{step}") for step in (1, 2, 3, 4)]
    assert [bool(meta["results"]) for meta in metas] == [False, True, False, True]
