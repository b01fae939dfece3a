"""Names of run directories: an evaluation has one of its own, and takes nobody's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.utils.rundir.test_directory import OFF
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.folders import make_another, refuse_inside


def evaluation(folder: Path) -> Path:
    with RunDirectory(folder, Dist(), evaluates=True) as run:
        run.begin("eval_only: true\n", OFF)
        run.finish(0)
    return run.directory


def test_each_evaluation_has_a_directory_of_its_own(tmp_path: Path) -> None:
    assert [evaluation(tmp_path / "x").name for _ in range(3)] == ["x", "x-2", "x-3"]
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes.txt").touch()
    assert [evaluation(tmp_path / "y").name for _ in range(2)] == ["y", "y-2"]
    assert sorted(os.listdir(tmp_path)) == ["x", "x-2", "x-3", "y", "y-2"]


def test_a_training_without_a_checkpoint_yet_is_left_alone(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "x", Dist()) as run:
        run.begin("a: 1", OFF)
        assert evaluation(tmp_path / "x").name == "x-2"
    assert (tmp_path / "x" / "config.yaml").read_text() == "a: 1"


def test_a_file_in_its_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=r"^checkpoint_path=.*/x: is a file; give a folder"):
        evaluation(tmp_path / "x")


def test_many_that_ask_at_once_get_as_many(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    got: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: [got.append(make_another(tmp_path / "x").name) for _ in range(20)]
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == len(got) == 160


def test_no_run_lives_within_anothers_checkpoints(tmp_path: Path) -> None:
    """Which it would be deleted with, as one that is kept no longer."""
    step = tmp_path / "a" / "checkpoints" / "step_5"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (step.parent / "latest").write_text("step_5\n")
    for inside in (step, step / "new", step.parent, step.parent / "new" / "deep"):
        with pytest.raises(
            ConfigError,
            match=r"^checkpoint_path=.*: .* belongs to a run's checkpoints",
        ):
            refuse_inside(inside)
    for other in (tmp_path / "a", tmp_path / "b" / "c"):
        refuse_inside(other)


@pytest.mark.parametrize(
    "name",
    [
        "log.txt",
        ".status.json.writing",
        "checkpoints",
        "checkpoints/step_1/meta.json",
        "evaluations/x",
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_writes_through_no_link(name: str, evaluates: bool, tmp_path: Path) -> None:
    """A folder may come from a stranger, and its links lead to any file of the user's."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / name).parent.mkdir(parents=True)
    elsewhere.write_text("keep")
    (run / name).symlink_to(elsewhere)
    with (
        pytest.raises(ConfigError, match=f"{name} there is a link"),
        RunDirectory(run, Dist(), evaluates),
    ):
        pass
    assert elsewhere.read_text() == "keep"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with RunDirectory(tmp_path / "run", Dist()) as run:
        run.begin("a: 1", OFF)
    assert (tmp_path / "disk" / "config.yaml").read_text() == "a: 1"


def test_lines_in_the_log_hold_no_control_characters(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", Dist()) as run:
        run.begin("a: 1", OFF)
        run.say("one\x1b[2J\ntwo")
    assert r"one\x1b[2J" in (tmp_path / "run" / "log.txt").read_text()
