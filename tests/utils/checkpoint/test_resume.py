"""Where a run begins, asked of the functions that decide it: fallbacks, its own directory, and what it must not lose."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.utils.checkpoint.writer_rank import alone, declare
from utils.checkpoint import reader, resume, snapshot
from utils.checkpoint.resume import Start
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def config(directory: Path, **changes: Any) -> DictConfig:
    made = {"shards": 8, "resume": "auto", "checkpoint_path": str(directory), "eval_only": False, "init_from": None, "max_steps": 99}
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
    places += [Path(os.path.relpath(place)) for place in places] + [link / place.relative_to(run) for place in places]
    return [*places, run / "checkpoints" / ".." / "checkpoints", run / "checkpoints" / "step_20" / ".." / "step_30"]


def test_its_own_directory_is_where_it_goes_on_anyhow(run: Path) -> None:
    for place in ways_to(run):
        start = found(run, resume=str(place))
        assert (start.continues, start.step) == (True, 30), place
    linked = found(run.parent / "link", resume=str(run))
    assert linked.continues


def test_its_own_directory_before_the_first_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    start = found(run, resume=str(run))
    assert (start.continues, start.folder) == (True, None), "a crash before the first save: the same command goes on"
    assert "no such file or folder" in refused(tmp_path / "none", resume=str(tmp_path / "none"))


def test_the_same_command_goes_on_when_the_run_has_come_further(run: Path) -> None:
    """What the command names is then an earlier step, or deleted."""
    named = str(run / "checkpoints" / "step_30")
    meta = found(run, resume=named).meta
    assert meta["resumed_from"] == named
    later = alone(run / "checkpoints", 60)
    text = later.joinpath("meta.json").read_text().replace('"resumed_from": ""', f'"resumed_from": "{named}"')
    later.joinpath("meta.json").write_text(text)
    declare(later)
    assert found(run, resume=named).step == 60
    shutil.rmtree(run / "checkpoints" / "step_30")
    assert found(run, resume=named).step == 60


def test_its_own_earlier_step_is_refused(run: Path) -> None:
    backup = run / "backup" / "step_20"
    shutil.copytree(run / "checkpoints" / "step_20", backup)
    (run.parent / "link").symlink_to(run)
    for place in (run / "checkpoints" / "step_20", backup, run.parent / "link" / "checkpoints" / "step_20"):
        line = refused(run, resume=str(place))
        assert line.startswith(
            f"resume={place}: lies in this run's own directory, and the run goes on from its newest; give another run_name"
        )
    start = found(run.parent / "other", resume=str(run / "checkpoints" / "step_20"))
    assert (start.continues, start.step) == (False, 20)


def test_a_damaged_newest_makes_the_one_before_the_newest(run: Path) -> None:
    (run / "checkpoints" / "step_30" / "ema.safetensors").unlink()
    start = resume.find(config(run, resume=str(run / "checkpoints" / "step_20")), Dist(), print)
    assert (start.continues, start.step) == (True, 20)


def test_weights_that_would_be_moved_aside(run: Path) -> None:
    line = refused(run, init_from=str(run), resume=False)
    assert line.startswith(f"init_from={run}: lies in this run's own directory, which is to be moved aside; give another run_name")
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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that were tried; of these steps none fits."""
    tried: list[str] = []

    def restore(job: Any, folder: Path, meta: Mapping[str, Any]) -> None:
        tried.append(folder.name)
        if meta["step"] in job.unfit:
            raise ConfigError(f"checkpoint={folder}: model: weight is missing from it")
        job.step = meta["step"]

    monkeypatch.setattr(snapshot, "restore", restore)
    return tried


def job_of(directory: Path, unfit: tuple[int, ...], said: list[str], **changes: Any) -> Any:
    source = SimpleNamespace(spec=SimpleNamespace(fingerprint="x"))
    run = SimpleNamespace(say=said.append)
    return SimpleNamespace(cfg=config(directory, **changes), dist=Dist(), source=source, total_steps=99, run=run, unfit=unfit, step=0)


def test_what_does_not_fit_is_told_and_the_one_before_taken(run: Path, taken: list[str]) -> None:
    said: list[str] = []
    alone(run / "checkpoints", 40)
    (run / "checkpoints" / "step_30" / "ema.safetensors").unlink()
    job = job_of(run, (40,), said)
    start = resume.take_up(job, found(run))
    assert (start.step, start.continues, job.step, taken) == (20, True, 20, ["step_40", "step_20"])
    assert said == [
        "checkpoint step_30 is damaged (ema.safetensors: missing); going back to the one before",
        "checkpoint step_40 does not fit (model: weight is missing from it); going back to step_20",
    ]


def test_where_none_fits_the_run_is_not_begun_again_unasked(run: Path, taken: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resume.take_up(job_of(run, (20, 30), []), found(run))
    assert str(caught.value) == (
        f"checkpoint_path={run}: no checkpoint there fits (step_20: model: weight is missing from it); "
        "add resume=false to move all that aside and begin again"
    )
    assert taken == ["step_30", "step_20"]


def test_what_resume_names_and_does_not_fit_is_refused(run: Path, taken: list[str]) -> None:
    other = run.parent / "other"
    with pytest.raises(ConfigError, match=rf"^resume={run}: step_30 does not fit \(model: weight is missing from it\); give another step_"):
        resume.take_up(job_of(other, (30,), [], resume=str(run)), found(other, resume=str(run)))
    assert taken == ["step_30"]


def test_what_is_deleted_before_it_is_taken_is_read_again(run: Path, taken: list[str]) -> None:
    """Beside a live run: between finding its checkpoint and building the net it has gone on."""
    other = run.parent / "other"
    start = found(other, resume=str(run))
    alone(run / "checkpoints", 50, keep=1)
    job = job_of(other, (30,), [], resume=str(run))
    assert resume.take_up(job, start).step == 50
    assert (job.step, taken) == (50, ["step_30", "step_50"])


def test_an_evaluation_beside_a_live_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def load(job: Any, path: str) -> None:
        tried.append(Path(path).name)
        if len(tried) < 3:
            alone(run / "checkpoints", 30 + len(tried), keep=1)
            raise ConfigError(f"checkpoint={path}: no such file or folder")

    monkeypatch.setattr(snapshot, "load_weights", load)
    resume.take_up(job_of(run.parent / "other", (), [], eval_only=True, checkpoint=str(run)), Start())
    assert tried == ["step_30", "step_31", "step_32"]
    monkeypatch.setattr(snapshot, "load_weights", lambda job, path: reader.load(Path(path) / "gone"))
    with pytest.raises(ConfigError, match="no such file"):
        resume.take_up(job_of(run.parent / "other", (), [], eval_only=True, checkpoint=str(run)), Start())


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_link_that_leads_to_itself_is_one_line(key: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    if key == "resume":
        assert refused(tmp_path / "new", resume=str(loop)).startswith(f"resume={loop}: ")
    else:
        assert found(tmp_path / "new", init_from=str(loop)) == Start(), "that it cannot be read is said where it is read"


def test_a_pointer_is_followed_and_is_no_file_of_weights(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "checkpoints" / "best").write_text("step_20\n")
    for name, step in (("latest", 30), ("best", 20)):
        pointer = run / "checkpoints" / name
        assert found(tmp_path / "other", resume=str(pointer)).step == step
        assert reader.load(pointer)[1]["step"] == step
        assert not reader.is_weights(pointer)
    monkeypatch.chdir(run)
    assert reader.load(".")[1]["step"] == 30
