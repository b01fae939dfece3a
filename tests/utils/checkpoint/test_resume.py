"""The functions that decide where a run begins: fallbacks, its own directory, and what it must not
lose.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.utils.checkpoint.helpers import alone, as_it_is, declare, groups
from utils.checkpoint import reader, resume
from utils.checkpoint.registry import FrozenFiles, Origin, Registry, Saved, Tensors
from utils.checkpoint.resume import Start
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def config(directory: Path, **changes: Any) -> DictConfig:
    made = {
        "shards": 8,
        "resume": "auto",
        "checkpoint_path": str(directory),
        "eval_only": False,
        "init_from": None,
        "max_steps": 99,
    }
    return OmegaConf.create({**made, "checkpoint": None, **changes})


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


def ways_to(run: Path) -> list[Path]:
    link = run.parent / "link"
    link.symlink_to(run)
    newest = run / "checkpoints" / "step_30"
    places = [run, run / "checkpoints", newest, run / "checkpoints" / "latest"]
    places += [Path(os.path.relpath(place)) for place in places] + [
        link / place.relative_to(run) for place in places
    ]
    return [
        *places,
        run / "checkpoints" / ".." / "checkpoints",
        run / "checkpoints" / "step_20" / ".." / "step_30",
    ]


def test_its_own_directory_is_where_it_goes_on_anyhow(run: Path) -> None:
    for place in ways_to(run):
        start = found(run, resume=str(place))
        assert (start.continues, start.step) == (True, 30), place
    linked = found(run.parent / "link", resume=str(run))
    assert linked.continues


def test_auto_arithmetic_is_what_the_run_has_or_the_machine_is_best_at(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "forward_dtype", lambda device: "float32")
    saved = "shards: 8\narch: {forward_dtype: bfloat16}\n"
    alone(run / "checkpoints", 40, config=saved)
    for asked, then, now in [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("bfloat16", True, "bfloat16"),
    ]:
        mine = config(run, arch={"forward_dtype": asked})
        resume.fix_arithmetic(
            mine, resume.find(mine, Dist(), pytest.fail) if then else Start(), Dist()
        )
        assert mine.arch.forward_dtype == now
    assert "arch.forward_dtype=float32: the run in" in refused(
        run, arch={"forward_dtype": "float32"}
    )
    without = config(run, arch={"width": 3})  # a net may have no such key
    resume.fix_arithmetic(without, Start(), Dist())
    assert without.arch == {"width": 3}


@pytest.mark.parametrize(
    ("asked", "before", "now"),
    [
        ("auto", "true", True),
        ("auto", "auto", False),  # it has decided against it
        ("auto", "false", False),
        (False, "true", False),
        (True, "false", True),
    ],
)
def test_a_run_stays_compiled_or_not(
    run: Path, asked: str | bool, before: str, now: str | bool
) -> None:
    alone(run / "checkpoints", 40, config=f"shards: 8\narch: {{}}\ncompile: {before}\n")
    mine = config(run, arch={}, compile=asked)
    resume.fix_arithmetic(mine, resume.find(mine, Dist(), pytest.fail), Dist())
    assert mine.compile is now
    fresh = config(run, arch={}, compile=asked)
    resume.fix_arithmetic(fresh, Start(), Dist())
    assert fresh.compile == asked, "before its first step it decides by itself"


def test_its_own_directory_before_the_first_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    start = found(run, resume=str(run))
    assert (start.continues, start.folder) == (
        True,
        None,
    ), "a crash before the first save: the same command goes on"
    assert "no such file or folder" in refused(tmp_path / "none", resume=str(tmp_path / "none"))


def test_the_same_command_goes_on_when_the_run_has_come_further(run: Path) -> None:
    """The checkpoint that the command names is then an earlier step, or deleted."""
    named = str(run / "checkpoints" / "step_30")
    meta = found(run, resume=named).meta
    assert meta["resumed_from"] == named
    later = alone(run / "checkpoints", 60)
    text = (
        later.joinpath("meta.json")
        .read_text()
        .replace('"resumed_from": ""', f'"resumed_from": "{named}"')
    )
    later.joinpath("meta.json").write_text(text)
    declare(later)
    assert found(run, resume=named).step == 60
    shutil.rmtree(run / "checkpoints" / "step_30")
    assert found(run, resume=named).step == 60


def test_its_own_earlier_step_is_refused(run: Path) -> None:
    backup = run / "backup" / "step_20"
    shutil.copytree(run / "checkpoints" / "step_20", backup)
    (run.parent / "link").symlink_to(run)
    for place in (
        run / "checkpoints" / "step_20",
        backup,
        run.parent / "link" / "checkpoints" / "step_20",
    ):
        line = refused(run, resume=str(place))
        assert line.startswith(
            f"resume={place}: lies in this run's own directory, and the run goes on from its"
            " newest; give another run_name"
        )
    start = found(run.parent / "other", resume=str(run / "checkpoints" / "step_20"))
    assert (start.continues, start.step) == (False, 20)


def test_a_damaged_newest_makes_the_one_before_the_newest(run: Path) -> None:
    (run / "checkpoints" / "step_30" / "ema.safetensors").unlink()
    start = resume.find(config(run, resume=str(run / "checkpoints" / "step_20")), Dist(), print)
    assert (start.continues, start.step) == (True, 20)


def test_weights_that_would_be_moved_aside(run: Path) -> None:
    line = refused(run, init_from=str(run), resume=False)
    assert line.startswith(
        f"init_from={run}: lies in this run's own directory, which is to be moved aside; give"
        " another run_name"
    )
    assert found(run, init_from=str(run)).continues, "it has them already"
    assert found(run.parent / "other", init_from=str(run)) == Start()


def test_a_configuration_left_behind_that_is_none(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for content in (b"", b"\xff", b"a: [", b"- 1", b"a: &a [1]\nb: *a\n", b"[" * 100_000):
        (run / "config.yaml").write_bytes(content)
        assert found(run) == Start()
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert found(run) == Start()


def test_what_may_not_be_read_is_one_line(run: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    assert "File name too long" in refused(run, resume=str(long))
    assert "File name too long" in refused(long)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(run, resume=str(loop))
    os.mkfifo(tmp_path / "pipe")
    refused(run, resume=str(tmp_path / "pipe"))


# --- checkpoints that are whole and do not fit


class Unfit(Registry):
    """The parts of a run that take no checkpoint of these steps; which ones they were asked to
    take.
    """

    def __init__(
        self, *steps: int, fingerprint: str = "x", frozen: FrozenFiles | None = None
    ) -> None:
        super().__init__(
            lambda: Origin("", fingerprint, None, 0.1, frozen or {}, "", "2", 1), as_it_is()
        )
        self.steps, self.asked = steps, list[int]()
        self.taken: Mapping[str, Any] = {}
        for name in ("model", "ema"):
            self.add(name, dict, lambda tensors: None)

    def check(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved], step: int) -> None:
        assert groups.keys() == {"model", "ema"}
        assert len(shards) in (0, 4, 8)
        self.asked.append(step)
        if step in self.steps:
            raise ConfigError("model: weight is missing from it")

    def load(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved]) -> None:
        self.taken = groups


def taken_up(
    start: Start, saved: Registry, directory: Path, said: list[str] | None = None, **changes: Any
) -> Start:
    run: Any = SimpleNamespace(say=pytest.fail if said is None else said.append, dist=Dist())
    return resume.restore(start, saved, config(directory, **changes), run, 99)


def test_what_does_not_fit_is_named_and_the_one_before_taken(run: Path) -> None:
    said: list[str] = []
    alone(run / "checkpoints", 40)
    (run / "checkpoints" / "step_30" / "ema.safetensors").unlink()
    saved = Unfit(40)
    start = taken_up(found(run), saved, run, said)
    assert (start.step, start.continues, saved.run_state.step, saved.asked) == (
        20,
        True,
        20,
        [40, 20],
    )
    assert torch.equal(saved.taken["model"]["weight"].read(), groups(20.0)["model"]["weight"])
    assert said == [
        "checkpoint step_30 is damaged (ema.safetensors: missing); going back to the one before",
        "checkpoint step_40 does not fit (model: weight is missing from it); going back to step_20",
    ]


def test_where_none_fits_the_run_is_not_begun_again_unasked(run: Path) -> None:
    saved = Unfit(20, 30)
    with pytest.raises(ConfigError) as caught:
        taken_up(found(run), saved, run, [])
    assert (
        str(caught.value)
        == f"checkpoint_path={run}: no checkpoint there fits (step_20: model: weight is missing"
        " from it); add resume=false to move all that aside and begin again"
    )
    assert (saved.asked, saved.taken, saved.run_state.step) == ([30, 20], {}, 0)


def test_what_resume_names_and_does_not_fit_is_refused(run: Path) -> None:
    other, saved = run.parent / "other", Unfit(30)
    with pytest.raises(
        ConfigError,
        match=(
            rf"^resume={run}: step_30 does not fit \(model: weight is missing from it\); give"
            r" another step_"
        ),
    ):
        taken_up(found(other, resume=str(run)), saved, other, resume=str(run))
    assert saved.asked == [30]


def test_what_is_deleted_before_it_is_taken_is_read_again(run: Path) -> None:
    """Beside a live run: between finding its checkpoint and building the net it has gone on."""
    other, saved = run.parent / "other", Unfit()
    start = found(other, resume=str(run))
    alone(run / "checkpoints", 50, keep=1)
    assert taken_up(start, saved, other, resume=str(run)).step == 50
    assert (saved.run_state.step, saved.asked) == (50, [50])


def test_what_differs_is_said_and_other_data_refused(run: Path) -> None:
    said: list[str] = []
    saved = Unfit()
    saved.origin = lambda: Origin("", "x", None, 0.1, {}, "", "2", 7)
    taken_up(found(run), saved, run, said)
    assert said == [
        "threads: 1 when the checkpoint was written, 7 now; the run goes on, with other rounding"
    ]
    with pytest.raises(
        ConfigError,
        match=r"^data_path=None: not the data of the run in .*step_30, or cut into other windows; ",
    ):
        taken_up(found(run), Unfit(fingerprint="y"), run, data_path=None)


@dataclass
class Ranks:
    """One rank's view of others that read the same checkpoint."""

    everyone: list[list[Any]]  # by message and rank
    world_size: int
    rank: int = 0

    def all_gather_text(self, text: str) -> list[str]:
        said = [json.dumps(each) for each in self.everyone.pop(0)]
        assert said[self.rank] == text
        return said


def test_a_file_is_hashed_once_on_each_host(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the ranks there that read it; and what another host reads counts as well."""
    monkeypatch.setattr(resume, "gethostname", lambda: "a")
    folder = run / "checkpoints" / "step_30"
    checkpoint = reader.open_checkpoint(folder)
    sha = {name: checkpoint.sha256[f"{name}.safetensors"] for name in ("ema", "model", "optimizer")}
    both = {f"{name}.safetensors": sha[name] for name in ("ema", "model")}
    one = {"model.safetensors": sha["model"]}
    asked = [["a", both], ["b", one], ["a", both]]
    ema, model = ({f"{name}.safetensors": sha[name]} for name in ("ema", "model"))
    other = {"model.safetensors": "0" * 64}
    unread = {"model.safetensors": "cannot be read (Input/output error)"}
    for theirs, why in (
        (model, ""),
        (other, "model.safetensors: sha256 differs on rank 1"),
        (unread, "model.safetensors: cannot be read (Input/output error) on rank 1"),
    ):
        dist: Any = Ranks([asked, [ema, theirs, model]], 3)
        problem = resume.damage_seen_by_any(checkpoint, both, dist)
        assert problem == (f"step_30 is damaged ({why})" if why else "")
    stale = [["a", both], ["b", other]]
    dist = Ranks([stale, [both, other]], 2)
    assert resume.damage_seen_by_any(checkpoint, both, dist).endswith("sha256 differs on rank 1)")
    content = (folder / "ema.safetensors").read_bytes()
    (folder / "ema.safetensors").write_bytes(content[:-1] + b"x")
    assert resume.damage_seen_by_any(checkpoint, both, Dist()) == (
        "step_30 is damaged (ema.safetensors: sha256 differs)"
    )


def test_every_file_is_hashed_by_one_rank_of_each_host_that_reads_it() -> None:
    """Ranks may read different files, as after a change of their number or with `sync=fsdp`."""
    draw = random.Random(0)
    names = [f"{group}.{number}" for group in ("model", "ema", "shards") for number in range(4)]
    for _ in range(1000):
        everyone = [
            (draw.choice("ab"), draw.sample(names, draw.randint(0, len(names))))
            for _ in range(draw.randint(1, 9))
        ]
        hashed = [
            (host, name)
            for rank, (host, _) in enumerate(everyone)
            for name in resume.files_to_hash(everyone, rank)
        ]
        read = {(host, name) for host, files in everyone for name in files}
        assert sorted(hashed) == sorted(read)
        for rank, (_, files) in enumerate(everyone):
            assert {*resume.files_to_hash(everyone, rank)} <= {*files}


FROZEN = {"target": {"path": "runs/target/model.safetensors", "sha256": "a" * 64}}


@pytest.mark.parametrize("evaluates", [False, True])
def test_another_frozen_part_is_refused(evaluates: bool, run: Path) -> None:
    """By its content: where it lies does not matter. A checkpoint of before says nothing of it."""
    changes: dict[str, Any] = {
        "eval_only": evaluates,
        "checkpoint": str(run) if evaluates else None,
    }
    moved = {"target": {"path": "elsewhere/x", "sha256": "a" * 64}}
    taken_up(found(run, **changes), Unfit(frozen=moved), run, **changes)
    newest = alone(run / "checkpoints", 40, frozen=FROZEN)
    for frozen in (FROZEN, moved, {**moved, "more": FROZEN["target"]}):
        assert taken_up(found(run, **changes), Unfit(frozen=frozen), run, **changes).step == 40
    saved = Unfit(frozen={"target": {"path": "elsewhere/x", "sha256": "b" * 64}})
    with pytest.raises(ConfigError) as caught:
        taken_up(found(run, **changes), saved, run, **changes)
    assert (
        str(caught.value)
        == f"target=elsewhere/x: not what the run in {newest} was trained with (sha256"
        " bbbbbbbbbbbb, there aaaaaaaaaaaa); give the file that was"
        " runs/target/model.safetensors then"
    )
    assert saved.asked == []


def test_an_evaluation_beside_a_live_run(run: Path) -> None:
    """Its checkpoint is deleted twice before it is read. An evaluation that can never fit ends."""
    changes: dict[str, Any] = {"eval_only": True, "checkpoint": str(run)}

    class Late(Unfit):
        def check(
            self, groups: Mapping[str, Saved], shards: Mapping[int, Saved], step: int
        ) -> None:
            super().check(groups, shards, step)
            if step < 32:
                alone(run / "checkpoints", step + 1, keep=1)
                raise ConfigError("it has changed meanwhile")

    saved = Late()
    start = found(run.parent / "other", **changes)
    assert (start.continues, start.meta) == (False, {"step": 30})
    taken_up(start, saved, run.parent / "other", **changes)
    assert (saved.asked, saved.run_state.step) == ([30, 31, 32], 32)
    with pytest.raises(
        ConfigError,
        match=rf"^checkpoint={run}/checkpoints/step_32: model: weight is missing from it$",
    ):
        taken_up(found(run.parent / "other", **changes), Unfit(32), run.parent / "other", **changes)
    assert refused(run.parent / "other", eval_only=True, checkpoint=str(run / "gone")).startswith(
        f"checkpoint={run}/gone: no such file"
    )


def test_what_is_deleted_while_it_is_taken_is_read_again(run: Path) -> None:
    """Beside a live run, after the files were hashed."""
    changes: dict[str, Any] = {"eval_only": True, "checkpoint": str(run)}

    class Late(Unfit):
        def load(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved]) -> None:
            if self.asked == [30]:
                alone(run / "checkpoints", 31, keep=1)
            super().load(groups, shards)
            for group in groups.values():
                for stored in group.values():
                    stored.read()

    saved = Late()
    taken_up(found(run.parent / "other", **changes), saved, run.parent / "other", **changes)
    assert (saved.asked, saved.run_state.step) == ([30, 31], 31)


def test_an_evaluation_reads_no_more_than_weights(run: Path, tmp_path: Path) -> None:
    """The rest of the checkpoint may be damaged; the weights may not; and a file of weights will
    do.
    """
    changes: dict[str, Any] = {"eval_only": True, "checkpoint": str(run)}
    folder = run / "checkpoints" / "step_30"
    for name in ("optimizer.safetensors", "shards.0-7.safetensors"):
        (folder / name).write_bytes(b"")
    assert taken_up(found(run, **changes), Unfit(), run, **changes).step == 30
    content = (folder / "ema.safetensors").read_bytes()
    (folder / "ema.safetensors").write_bytes(content[:-1] + b"x")
    with pytest.raises(
        ConfigError,
        match=rf"^checkpoint={folder}: step_30 is damaged \(ema.safetensors: sha256 differs\)",
    ):
        taken_up(found(run, **changes), Unfit(), run, **changes)
    saved = Registry(lambda: Origin("", "x", None, 0.1, {}, "", "2", 1), as_it_is())
    mine: list[Tensors] = []
    saved.add("weights", lambda: groups(20.0)["model"], mine.append)
    bare = {
        "checkpoint": str(run / "checkpoints" / "step_20" / "model.safetensors"),
        "eval_only": True,
    }
    start = taken_up(found(run, **bare), saved, run, **bare)
    assert (start.step, mine[0]["weight"].max().item()) == (0, 20.0)


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_link_that_leads_to_itself_is_one_line(key: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    if key == "resume":
        assert refused(tmp_path / "new", resume=str(loop)).startswith(f"resume={loop}: ")
    else:
        assert found(tmp_path / "new", init_from=str(loop)) == Start(), (
            "that it cannot be read is said where it is read"
        )


def test_a_pointer_is_followed_and_is_no_file_of_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "best").write_text("step_20\n")
    for name, step in (("latest", 30), ("best", 20)):
        pointer = run / "checkpoints" / name
        assert found(tmp_path / "other", resume=str(pointer)).step == step
        assert reader.load(pointer)[1]["step"] == step
        assert not reader.is_weights(pointer)
    monkeypatch.chdir(run)
    assert reader.load(".")[1]["step"] == 30
