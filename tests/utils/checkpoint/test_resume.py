"""Where a run begins: fallbacks, its own directory, what it must not lose, and what every number of
ranks reads.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.utils.checkpoint.helpers import (
    META,
    SHARDS,
    Held,
    alone,
    as_it_is,
    flip,
    groups,
    on_ranks,
    shard_state,
    together,
)
from utils.checkpoint import format, resume, tools
from utils.checkpoint.registry import Group, Registry
from utils.checkpoint.resume import Start
from utils.command.config import with_arithmetic
from utils.command.root import Config
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def config(directory: Path, **changes: Any) -> Config:
    made = {
        "shards": 8,
        "resume": "auto",
        "checkpoint_path": str(directory),
        "eval_only": False,
        "init_from": None,
        "run_name": "mine",
        "max_steps": 99,
        "compile": "auto",
    }
    return Config.model_construct(**{**made, "checkpoint": None, **changes})


def found(directory: Path, **changes: Any) -> Start:
    return resume.find(config(directory, **changes), Dist(), pytest.fail)


def refused(directory: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resume.find(config(directory, **changes), Dist(), print)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    directory = tmp_path / "runs" / "mine"
    for step in (20, 30):
        alone(directory / "checkpoints", step)
    (directory / "config.yaml").write_text("shards: 8\n")
    return directory


def test_its_own_directory_is_where_it_goes_on_anyhow(run: Path) -> None:
    (run.parent / "link").symlink_to(run)
    newest = run / "checkpoints" / "step_30"
    for place in (run, Path(os.path.relpath(newest)), run.parent / "link" / "checkpoints"):
        start = found(run, resume=str(place))
        assert (start.continues, start.step) == (True, 30), place
    assert found(run.parent / "link", resume=str(run)).continues


def test_auto_arithmetic_is_what_the_run_has_or_the_machine_is_best_at(run: Path) -> None:
    alone(run / "checkpoints", 40, config={"shards": 8, "arch": {"forward_dtype": "bfloat16"}})
    for asked, then, now in [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("bfloat16", True, "bfloat16"),
    ]:
        mine = config(run, arch={"forward_dtype": asked})
        start = resume.find(mine, Dist(), pytest.fail) if then else Start()
        settled = with_arithmetic(mine, start.meta.get("config", {}), Dist(), "float32")
        assert settled.arch["forward_dtype"] == now
    assert "arch.forward_dtype=float32: the run in" in refused(
        run, arch={"forward_dtype": "float32"}
    )
    without = config(run, arch={"width": 3})  # a net may have no such key
    settled = with_arithmetic(without, {}, Dist(), "float32")
    assert (settled.arch, settled.compile) == ({"width": 3}, False)


def test_the_same_command_goes_on_when_the_run_has_come_further(run: Path) -> None:
    """The checkpoint that the command names is then an earlier step, or deleted."""
    named = str(run / "checkpoints" / "step_30")
    meta = found(run, resume=named).meta
    assert meta["resumed_from"] == named
    alone(run / "checkpoints", 60, resumed_from=named)
    assert found(run, resume=named).step == 60
    shutil.rmtree(run / "checkpoints" / "step_30")
    assert found(run, resume=named).step == 60


def test_its_own_earlier_step_is_refused(run: Path) -> None:
    earlier = run / "checkpoints" / "step_20"
    assert refused(run, resume=str(earlier)).startswith(
        f"resume={earlier}: lies in this run's own directory, and the run goes on from its"
        " newest; give another run_name"
    )
    start = found(run.parent / "other", resume=str(earlier))
    assert (start.continues, start.step) == (False, 20)


@pytest.mark.parametrize("asked", ["auto", "RUN"])
def test_a_key_that_differs_is_refused_with_what_would_help(asked: str, run: Path) -> None:
    """Under another name, `resume=PATH` would meet the same checkpoint."""
    named = asked == "RUN"
    line = refused(run, resume=str(run) if named else asked, shards=4)
    assert line.startswith(f"shards=4: the run in {run} has shards=8; keep that, ")
    assert ("choose another run_name" in line) != named
    assert ("give init_from in place of resume" in line) == named


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_weights_alone_are_refused_with_the_key_that_takes_them(file: str, run: Path) -> None:
    tools.export(str(run), run.parent / "exported")
    weights = run.parent / "exported" / file
    assert refused(run.parent / "other", resume=str(weights)) == (
        f"resume={weights}: holds weights alone; use init_from={weights} to begin with them"
    )


# --- taking up what is found


def taken_up(
    directory: Path, saved: Registry, said: list[str] | None = None, **changes: Any
) -> Start:
    return take_up(found(directory, **changes), directory, saved, said, **changes)


def take_up(
    start: Start, directory: Path, saved: Registry, said: list[str] | None = None, **changes: Any
) -> Start:
    say, mine = pytest.fail if said is None else said.append, config(directory, **changes)
    length = mine.max_steps or 0
    return resume.restore(start, saved, mine, say, length, lambda step: 0.1)


@pytest.mark.parametrize(
    ("before", "after", "splits"), [(1, 3, True), (3, 2, True), (4, 1, False), (2, 4, False)]
)
def test_any_ranks_go_on_and_see_a_flipped_bit_of_any_file(
    before: int, after: int, splits: bool, tmp_path: Path
) -> None:
    """Each rank gets what it holds; damage is named, and all take the checkpoint before."""
    directory = tmp_path / "checkpoints"
    for step in (1, 2):
        assert together(directory, before, step, splits=splits) == [""] * before

    def take(dist: Dist) -> tuple[int, dict[str, Any], list[str]]:
        saved, said = Held(dist, splits=splits), list[str]()
        asked = config(tmp_path)
        start = resume.find(asked, dist, said.append)
        start = resume.restore(start, saved, asked, said.append, 99, lambda step: 0.1)
        return start.step, saved.taken, said

    def taken() -> list[tuple[int, dict[str, Any], list[str]]]:
        return on_ranks(after, take)

    everyone = taken()
    weight = [each["model"]["weight"] for _, each, _ in everyone]
    assert torch.equal(torch.cat(weight) if splits else weight[0], groups(2.0)["model"]["weight"])
    states = {shard: state for _, each, _ in everyone for shard, state in each["state"].items()}
    for shard in range(SHARDS):
        assert torch.equal(states[shard]["0"], shard_state(shard, 2.0)["state/0"])
    for file in sorted((directory / "step_2").glob("*.safetensors")):
        flip(file)
        everyone = taken()
        assert [step for step, _, _ in everyone] == [1] * after
        assert {float(each["ema"]["average"][0, 0]) for _, each, _ in everyone} == {1.0}
        (line,) = everyone[0][2]
        assert line.startswith(f"checkpoint step_2 is damaged ({file.name}: sha256 differs")
        flip(file)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_rank_0_cannot_read_any_more_is_damaged_for_all(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its files have just been hashed, and some tensors taken."""
    for step in (1, 2):
        alone(tmp_path / "checkpoints", step)
    read_into, calls = format.Stored.read_into, iter(range(1000))

    def fails(stored: format.Stored, content: memoryview) -> None:
        if next(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read_into(stored, content)

    monkeypatch.setattr(format.Stored, "read_into", fails)

    def take(dist: Dist) -> tuple[int, float, list[str]]:
        saved, said, asked = Held(dist), list[str](), config(tmp_path)
        start = resume.find(asked, dist, said.append)
        start = resume.restore(start, saved, asked, said.append, 99, lambda step: 0.1)
        return start.step, saved.taken["model"]["weight"].max().item(), said

    everyone = on_ranks(ranks, take)
    assert [each[:2] for each in everyone] == [(1, 1.0)] * ranks
    (line,) = everyone[0][2]
    assert line == (
        "checkpoint step_2 is damaged (model.safetensors: Input/output error); going back to step_1"
    )


def test_what_resume_names_and_does_not_fit_or_is_damaged_is_refused(run: Path) -> None:
    other = run.parent / "other"
    with pytest.raises(ConfigError, match=rf"^resume={run}: step_30 does not fit \(model: weight "):
        taken_up(other, Held(rows=41), resume=str(run))
    flip(run / "checkpoints" / "step_30" / "ema.safetensors")
    with pytest.raises(
        ConfigError, match=rf"^resume={run}: step_30 is damaged \(ema.safetensors: "
    ):
        taken_up(other, Held(), resume=str(run))


@pytest.mark.parametrize("changes", [{"resume": "RUN"}, {"eval_only": True, "checkpoint": "RUN"}])
def test_what_a_run_that_goes_on_deletes_before_it_is_taken(
    changes: dict[str, Any], run: Path
) -> None:
    """Between finding its checkpoint and building the net it has gone on."""
    other = run.parent / "other"
    changes = {key: str(run) if value == "RUN" else value for key, value in changes.items()}
    start = found(other, **changes)
    alone(run / "checkpoints", 50, keep=1)
    saved = Held()
    assert take_up(start, other, saved, **changes).step == 50
    assert saved.taken["model"]["weight"].max() == 50.0


def test_what_differs_is_said_and_other_data_refused(run: Path) -> None:
    said: list[str] = []
    taken_up(run, Held(threads=7, compile=True, device="cuda"), said)
    assert said == [
        f"{what} when the checkpoint was written, {now} now; the run goes on, with other rounding"
        for what, now in (("threads: 1", 7), ("compile: false", "true"), ("device: cpu", "cuda"))
    ]
    for part, keys in [("the dataset", {"prompt": "new"}), ("the evaluation set val", None)]:
        line = (
            rf"^data_path=null: not the data of the run in .*step_30 \({part} differs\); give that"
        )
        with pytest.raises(ConfigError, match=line):
            taken_up(run, Held(data=META["data"] | {part: "z"}), data_path=None, data=keys)


def test_a_length_that_ends_before_the_checkpoint_is_refused(run: Path) -> None:
    """With max_steps, a derived name would change, and begin another run."""
    line = "^max_steps=9: that is 9 steps, and the run has done 30; raise max_steps, with run_name"
    with pytest.raises(ConfigError, match=f"{line}=mine"):
        taken_up(run, Held(), max_steps=9)


def test_an_evaluation_may_ask_something_else(run: Path) -> None:
    """As by another `data.prompt`."""
    other = Held(data=META["data"] | {"the evaluation set sample": "new"})
    assert taken_up(run, other, data={"prompt": "new"}).step == 30


@pytest.mark.parametrize("evaluates", [False, True])
def test_another_frozen_part_is_refused(evaluates: bool, run: Path) -> None:
    """By its content: where it lies does not matter."""
    changes: dict[str, Any] = {"eval_only": evaluates}
    changes["checkpoint"] = str(run) if evaluates else None
    there = {"target": {"path": "runs/target/model.safetensors", "sha256": "a" * 64}}
    moved = {"target": {"path": "elsewhere/x", "sha256": "a" * 64}}
    newest = alone(run / "checkpoints", 40, frozen=there)
    assert taken_up(run, Held(frozen=moved), **changes).step == 40
    other = {"target": {"path": "elsewhere/x", "sha256": "b" * 64}}
    with pytest.raises(ConfigError) as caught:
        taken_up(run, Held(frozen=other), **changes)
    assert str(caught.value) == (
        f"target=elsewhere/x: not what the run in {newest} was trained with (sha256"
        " bbbbbbbbbbbb, there aaaaaaaaaaaa); give the file that was"
        " runs/target/model.safetensors then"
    )


def test_an_evaluation_reads_no_more_than_weights(run: Path) -> None:
    """The rest of the checkpoint may be damaged; the weights may not; and a file of weights will
    do.
    """

    def evaluated(checkpoint: Path) -> tuple[int, float]:
        mine: list[Any] = []
        saved = as_it_is(model=Group(lambda: groups(0.0)["model"], mine.append))
        start = taken_up(run, saved, eval_only=True, checkpoint=str(checkpoint))
        return start.step, mine[0]["weight"].max().item()

    folder = run / "checkpoints" / "step_30"
    (folder / "optimizer.safetensors").unlink()
    assert evaluated(run) == (30, 30.0)
    assert evaluated(run / "checkpoints" / "step_20" / "model.safetensors") == (0, 20.0)
    flip(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^checkpoint={folder}: step_30 is damaged \(model"):
        evaluated(run)
