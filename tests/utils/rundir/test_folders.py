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
    ("name", "evaluates"),
    [("log.txt", False), ("checkpoints/step_1/meta.json", False), ("evaluations/x", True)],
)
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
