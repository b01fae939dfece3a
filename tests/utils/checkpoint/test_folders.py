"""Which checkpoints are deleted, which stay, and what is never touched."""

import shutil
from pathlib import Path

import pytest

from tests.utils.checkpoint.helpers import alone, names
from utils.checkpoint import reader


def test_what_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        alone(tmp_path, step, keep=2, best=step == 1)
    assert names(tmp_path) == {"best", "latest", "step_1", "step_2", "step_3"}
    assert (tmp_path / "best").read_text() == "step_1\n"
    alone(tmp_path, 10, keep=2, best=True)
    assert names(tmp_path) == {"best", "latest", "step_10", "step_3"}
    alone(tmp_path, 11, keep=1)
    assert names(tmp_path) == {"best", "latest", "step_10", "step_11"}
    for step in (12, 13, 14):
        alone(tmp_path, step, keep=None)
    assert len(names(tmp_path)) == 7
    (tmp_path / "best").write_text("../elsewhere\n")
    alone(tmp_path, 12, keep=2)  # the run went back: what lies ahead is of another course
    assert names(tmp_path) == {"best", "latest", "step_11", "step_12"}


def test_only_names_that_the_writer_makes_are_touched(tmp_path: Path) -> None:
    alone(tmp_path, 4)
    strays = {"step_004", "step_4 (copy)", "step_-1", "step_٤", "xstep_1", "step_1.old", ".nfs01"}
    for name in strays:
        shutil.copytree(tmp_path / "step_4", tmp_path / name)
    for step in (5, 6, 7):
        alone(tmp_path, step, keep=2)
    assert names(tmp_path) == {"latest", "step_6", "step_7", *strays}


def test_links_are_unlinked_and_never_followed(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    shutil.move(alone(directory, 4), elsewhere / "step_4")
    (directory / "step_4").symlink_to(elsewhere / "step_4")
    (directory / ".step_3.deleted").symlink_to(elsewhere)
    (directory / ".step_2.writing-abc-1").symlink_to(elsewhere)
    assert reader.newest_whole(directory, pytest.fail) == directory / "step_4"
    for step in (5, 6, 7):
        alone(directory, step, keep=2)
    assert names(directory) == {"latest", "step_6", "step_7"}
    assert reader.verify(elsewhere / "step_4") == ""
