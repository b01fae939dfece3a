"""Which checkpoints are deleted and which stay, and what is left of a crash."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.utils.checkpoint.helpers import META, alone, groups, names, value_of
from utils.checkpoint import reader
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


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


def test_what_cannot_be_deleted_is_said_and_nothing_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "step_1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    writer = Writer(tmp_path, Dist(), said.append, keep=2)
    for step in (1, 2, 3, 4):
        writer.save(step, groups(float(step)), META)
        assert writer.wait() == ""
    writer.close()
    assert names(tmp_path) == {"latest", "step_1", "step_3", "step_4"}
    assert {*said} == {
        "checkpoints: step_1 cannot be deleted (Device or resource busy); delete it yourself"
    }


def test_leftovers_of_a_crash_are_finished_or_removed(tmp_path: Path) -> None:
    for step in (5, 6):
        alone(tmp_path, step, best=step == 5)
    for name in (".step_7.writing-abc-1", ".step_5.replaced", ".step_4.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a user's")
    (tmp_path / "best").rename(tmp_path / ".best.writing")  # about to be moved in
    (tmp_path / ".latest.writing").write_text("step_9\n")  # whose folder is not there
    # died between the two renames: this is step 6
    (tmp_path / "step_6").rename(tmp_path / ".step_6.replaced")
    assert reader.newest_whole(tmp_path, pytest.fail) == tmp_path / "step_6"
    (tmp_path / "step_6").rename(tmp_path / ".step_6.replaced")
    alone(tmp_path, 8, keep=1)
    assert names(tmp_path) == {"best", "latest", "notes.txt", "step_5", "step_8"}
    assert (tmp_path / "best").read_text() == "step_5\n"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    alone(tmp_path, 5, value=1.0)
    alone(tmp_path, 5, value=2.0, best=True)
    assert names(tmp_path) == {"best", "latest", "step_5"}
    assert value_of(tmp_path) == 2.0


def test_a_run_directory_that_is_gone_does_not_come_back(tmp_path: Path) -> None:
    said: list[str] = []
    writer = Writer(tmp_path / "run" / "checkpoints", Dist(), said.append)
    (tmp_path / "run").rename(tmp_path / "moved")
    writer.save(2, groups(2.0), META)
    assert writer.wait() == "rank 0: No such file or directory"
    assert said == [
        "checkpoint of step 2 FAILED on rank 0: No such file or directory; training goes on, there"
        " is no whole one yet"
    ]
    assert names(tmp_path) == {"moved"}


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^checkpoint_path: .*/x cannot be used \(Not a dir"):
        Writer(tmp_path / "file" / "x", Dist(), pytest.fail)
