"""A real study: three keys, eight trials, bad ones stopped early, the sweep interrupted and gone on
with.
"""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.ranks import until
from tests.runs import status
from tests.utils.sweep.test_sweep import SHORT, start, summary, sweep
from utils.errors import ConfigError
from utils.sweep.space import space_of

optuna = pytest.importorskip(
    "optuna", reason="Optuna is not installed: pip install 'optuna>=4.9,<5'"
)
CategoricalDistribution = optuna.distributions.CategoricalDistribution
FloatDistribution = optuna.distributions.FloatDistribution
IntDistribution = optuna.distributions.IntDistribution

SPACE = ["lr=tag(log,interval(1e-5,1e-1))", "arch.L_cycles=range(1,4)", "optim=adamw,adam_atan2"]
FIXED = [
    override
    for override in SHORT
    if not override.startswith(("lr=", "arch.L_cycles=", "eval_every_steps="))
]
STUDY = [
    "-m",
    "hydra/sweeper=optuna",
    *SPACE,
    "hydra.sweeper.random_trials=4",
    "hydra.sweeper.prune_after=2",
    *FIXED,
    "max_steps=80",
    "eval_every_steps=20",
    "objective_metric=-eval/lm_loss",
]


def trials(folder: Path) -> list[tuple[str, str]]:
    """Parameters and state of each, from the file."""
    (file,) = folder.glob("runs/multirun/*/study.db")
    with closing(sqlite3.connect(file)) as study:
        rows = study.execute(
            "select t.number, group_concat(p.param_name || '=' || p.param_value), t.state from"
            " trials t join trial_params p on p.trial_id = t.trial_id group by t.trial_id order by"
            " t.number"
        ).fetchall()
    return [(str(values), str(state)) for _, values, state in rows]


@pytest.mark.slow
def test_a_study_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    command = [*STUDY, "hydra.sweeper.trials=8", "sweep.jobs=2"]
    process = start(tmp_path, *command)
    assert until(
        lambda: len(list(tmp_path.glob("runs/puzzles/*/checkpoints/latest"))) >= 3, within=150
    )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    first = trials(tmp_path)
    assert len(first) < 8
    unfinished = [number for number, (_, state) in enumerate(first) if state == "RUNNING"]
    assert unfinished
    steps = {
        file.parent: status(file.parent)["step"]
        for file in tmp_path.glob("runs/puzzles/*/status.json")
    }

    code, out, err = sweep(tmp_path, *command)
    assert code == 0, err
    then = trials(tmp_path)
    assert len(then) == 8
    assert [values for values, _ in then[: len(first)]] == [values for values, _ in first], (
        "the same trials"
    )
    assert {state for _, state in then} == {
        "COMPLETE",
        "PRUNED",
    }, "some were stopped early, none is left open"
    for number, (_, state) in enumerate(first):
        assert (f"trial {number + 1} of 8" in out) == (state == "RUNNING"), "none is repeated"
    rows = summary(tmp_path)
    assert [row["state"] for row in rows] == [
        "pruned" if state == "PRUNED" else "finished" for _, state in then
    ]
    for number in unfinished:
        run = tmp_path / rows[number]["directory"]
        # what is bad already is stopped before it goes on
        if steps.get(run) and then[number][1] == "COMPLETE":
            assert f"continued at step {steps[run]}" in (run / "log.txt").read_text()
    assert all(int(row["steps"]) < 80 for row in rows if row["state"] == "pruned")
    table = out.split("\n\n")[-2].splitlines()[1:]
    values = [float(row["value"]) for row in rows]
    assert table[0].split()[0] == rows[values.index(min(values))]["job"], "the best comes first"

    code, out, err = sweep(tmp_path, *command)
    assert code == 0, err
    assert "trial" not in out
    code, out, err = sweep(tmp_path, *STUDY, "hydra.sweeper.trials=9", "sweep.jobs=2")
    assert code == 0, err
    assert out.count(" of 9: ") == 1, "a longer sweep is the same study"


@pytest.mark.slow
def test_a_failed_job_is_a_failed_trial(tmp_path: Path) -> None:
    code, _, err = sweep(tmp_path, *STUDY, "hydra.sweeper.trials=2", "max_steps=4", "shards=3,5")
    assert code == 2
    assert [state for _, state in trials(tmp_path)] == ["FAIL"] * 2
    assert err.count("is not a multiple of shards=") == 2
    assert [row["state"] for row in summary(tmp_path)] == ["failed"] * 2
    again, _, err = sweep(tmp_path, *STUDY, "hydra.sweeper.trials=2", "max_steps=4", "shards=3,5")
    assert (again, err.count("is not a multiple of shards=")) == (
        2,
        2,
    ), "as long as a trial has failed, the sweep has"


@pytest.mark.slow
def test_what_failed_is_tried_again_and_a_repetition_is_not(tmp_path: Path) -> None:
    """Three values for twenty trials; a trial that failed has the same ones at the next start."""
    command = [
        "-m",
        "hydra/sweeper=optuna",
        "seed=0,1,2",
        *SHORT,
        "max_steps=4",
        "eval_every_steps=4",
        "hydra.sweeper.sampler=random",
    ]
    blocked = tmp_path / "runs" / "puzzles"
    blocked.parent.mkdir()
    blocked.write_text("no folder")
    code, _, err = sweep(tmp_path, *command, "hydra.sweeper.trials=1")
    assert code == 2
    assert "1 of 1 jobs failed" in err
    failed = trials(tmp_path)
    blocked.unlink()
    code, out, err = sweep(tmp_path, *command)
    assert code == 0, err
    then, rows = trials(tmp_path), summary(tmp_path)
    assert then[0] == (failed[0][0], "COMPLETE")
    assert {state for _, state in then} == {"COMPLETE"}
    assert len({values for values, _ in then}) == len(list(blocked.glob("*/status.json"))) == 3
    assert out.count("takes its value") == len(then) - 3 > 0
    assert "there are no other values: all 3 combinations have had a trial" in out
    assert len({(row["overrides"], row["value"], row["directory"]) for row in rows}) == 3


@pytest.mark.slow
def test_a_study_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    here = [
        "-m",
        "hydra/sweeper=optuna",
        "hydra.sweep.dir=here",
        *SHORT,
        "max_steps=4",
        "hydra.sweeper.trials=1",
        "shards=3,5",
    ]
    assert sweep(tmp_path, *here, "seed=0,1")[0] == 2
    assert (tmp_path / "here" / "study.db").exists()

    def line(*arguments: str) -> str:
        code, _, err = sweep(tmp_path, *here, *arguments)
        assert (code, err.count("\n")) == (2, 1), err
        return err

    assert line("seed=0,1,2").startswith(
        "error: seed: the study in here/study.db draws from another range; give the former"
    )
    assert line("seed=0,1", "hydra.sweeper.storage=nowhere").startswith(
        "error: hydra.sweeper.storage=nowhere: cannot be used as a study ("
    )
    (tmp_path / "here" / "study.db").write_text("not a database at all")
    assert line("seed=0,1").startswith("error: here/study.db: cannot be used as a study (")


def test_hydras_syntax_says_what_there_is_to_choose_from() -> None:
    space = space_of(
        [
            "lr=tag(log,interval(1e-4,1e-2))",
            "a=interval(0,1)",
            "b=int(interval(1,8))",
            "c=range(2,9,2)",
            "d=x,y",
            "e=choice(1,2)",
            "f=3",
        ],
        OverridesParser.create().config_loader,  # type: ignore[arg-type]
    )
    assert space.distributions == {
        "lr": FloatDistribution(1e-4, 1e-2, log=True),
        "a": FloatDistribution(0, 1),
        "b": IntDistribution(1, 8),
        "c": IntDistribution(2, 8, step=2),
        "d": CategoricalDistribution(["x", "y"]),
        "e": CategoricalDistribution(["1", "2"]),
    }
    values = {"lr": 1e-3, "a": 0.5, "b": 2, "c": 4, "d": "x", "e": "1"}
    assert space.overrides(values) == ["f=3", "lr=0.001", "a=0.5", "b=2", "c=4", "d=x", "e=1"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lr=3", "no key to choose values for"),
        ("lr=tag(log,interval(0,1))", "lr=tag"),
        ("lr=1 lr=interval(0,1)", "lr is given twice"),
    ],
)
def test_a_space_that_is_none_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        space_of(given.split(), None)  # type: ignore[arg-type]
