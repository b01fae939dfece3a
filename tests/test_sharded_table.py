"""`arch.puzzle_emb_sharded`: rows of the puzzle table on one rank each, and the same run to the
last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.data.recursive.helpers import ragged_groups, write_dataset
from tests.runs import EXACT, TINY_TRM, Result, assert_same_run, digest, learned, stopped, train

SHARDED = "arch.puzzle_emb_sharded=true"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A TRM on puzzles of which most have a row of their own, as many as no number of ranks
    divides.
    """
    folder = tmp_path_factory.mktemp("data")
    arrays = write_dataset(folder, ragged_groups(38))
    assert len(arrays["puzzle_identifiers"]) % 2 == 0, "and one more row, of the blank"
    write_dataset(folder, ragged_groups(11), split="test")
    own = [argument for argument in TINY_TRM if not argument.startswith("data.embedded")]
    return [
        *own,
        f"data_path={folder}",
        "puzzle_emb_lr=1e-2",
        "log_interval=5",
        "max_steps=23",
        "eval_interval=3",
    ]


@pytest.fixture(scope="module")
def whole(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One rank, which has the table whole."""
    return train(tmp_path_factory.mktemp("whole") / "run", *task, *EXACT)


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=slow) for ranks in (1, 2, 4, 8)])
def test_digests_and_metrics_are_those_of_a_whole_table(
    task: list[str], whole: Result, ranks: int, tmp_path: Path
) -> None:
    table = load_file(whole.directory / "checkpoints" / "step_23" / "model.safetensors")[
        "model.inner.puzzle_emb.weights"
    ]
    assert table.any(1).sum() > len(table) / 2, "else there is little to be shared out"
    shared = train(tmp_path / "run", *task, *EXACT, SHARDED, ranks=ranks)
    assert learned(shared) == learned(whole)
    assert digest(shared.directory) == digest(whole.directory)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(([SHARDED], 2), ([], 1), marks=slow),
        pytest.param(([], 1), ([SHARDED], 4), marks=slow),
        pytest.param(([SHARDED], 4), ([SHARDED], 2), marks=slow),
    ],
)
def test_either_goes_on_with_the_others_checkpoint(
    task: list[str],
    whole: Result,
    before: tuple[list[str], int],
    after: tuple[list[str], int],
    tmp_path: Path,
) -> None:
    stopped(tmp_path / "run", *task, *EXACT, *before[0], ranks=before[1])
    train(tmp_path / "run", *task, *EXACT, *after[0], ranks=after[1])
    assert digest(tmp_path / "run") == digest(whole.directory)


@slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ["micro_batch_size=3"]),
        (2, ["sync=ddp"]),
        (3, ["sync=fsdp"]),
        (2, ["ema_tables=false", "ema_rate=0.9"]),
    ],
)
def test_ways_and_micro_batches_and_uneven_ranks(
    task: list[str], ranks: int, more: list[str], tmp_path: Path
) -> None:
    averaging = [argument for argument in more if argument.startswith("ema")]
    one = train(tmp_path / "one", *task, "log_interval=1", *averaging)
    assert_same_run(
        one, train(tmp_path / "shared", *task, "log_interval=1", SHARDED, *more, ranks=ranks)
    )


@slow
def test_begins_with_the_rows_of_another_run(
    task: list[str], whole: Result, tmp_path: Path
) -> None:
    begun = [*task, *EXACT, "seed=5", f"init_from={whole.directory}"]
    one = train(tmp_path / "one", *begun)
    shared = train(tmp_path / "shared", *begun, SHARDED, ranks=2)
    assert digest(shared.directory) == digest(one.directory)


@slow
def test_evaluates_as_a_whole_table_does(task: list[str], whole: Result, tmp_path: Path) -> None:
    evaluated = [*task, *EXACT, "eval_only=true", f"checkpoint={whole.directory}"]
    one = train(tmp_path / "one", *evaluated)
    shared = train(tmp_path / "shared", *evaluated, SHARDED, ranks=2)
    assert learned(shared) == learned(one)
