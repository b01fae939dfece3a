"""Files that are deleted and files that stay, whatever lies among the checkpoints; and readers
beside a run that deletes.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.utils.checkpoint.helpers import META, SHARDS, alone, groups, shard_state
from utils.checkpoint import contents, manifest, reader, stepfolders
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def one(tmp_path: Path, said: list[str]) -> Writer:
    return Writer(tmp_path / "checkpoints", Dist(), said.append, keep=2)


def save(one: Writer, *steps: int) -> None:
    for step in steps:
        one.save(
            step,
            groups(float(step)),
            {shard: shard_state(shard, 0.0) for shard in range(SHARDS)},
            META,
        )
        assert one.wait() == ""


def test_only_names_that_the_writer_makes_count(
    one: Writer, said: list[str], tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    save(one, 4)
    strays = [
        "step_004",
        "step_4 (copy)",
        "step_",
        "step_-1",
        "step_+2",
        "step_1_000",
        "step_٤",
        "xstep_1",
        "step_1.old",
        ".step_04.deleted",
    ]
    for name in strays:
        shutil.copytree(directory / "step_4", directory / name)
    save(one, *range(5, 12))
    assert names(directory) == {"latest", "step_10", "step_11", *strays}
    Writer(directory, Dist(), said.append).close()
    assert names(directory) == {"latest", "step_10", "step_11", *strays}
    assert said == []
    for folder in (directory / "step_10", directory / "step_11"):
        shutil.rmtree(folder)
    assert reader.newest_whole(directory, pytest.fail) is None


def test_links_are_unlinked_and_never_followed(
    one: Writer, said: list[str], tmp_path: Path
) -> None:
    directory, big = tmp_path / "checkpoints", tmp_path / "big"
    save(one, 4)
    shutil.move(directory / "step_4", big / "step_4")
    (directory / "step_4").symlink_to(big / "step_4")
    (directory / ".step_3.deleted").symlink_to(big)
    (directory / ".step_2.writing-abc-1").symlink_to(big)
    (directory / ".step_1.deleted").symlink_to(tmp_path / "nothing")
    assert reader.newest_whole(directory, pytest.fail) == directory / "step_4"
    Writer(directory, Dist(), said.append).close()
    save(one, 5, 6, 7)
    assert names(directory) == {"latest", "step_6", "step_7"}
    (directory / "step_8").symlink_to(big / "step_4")
    (directory / "step_9").symlink_to(tmp_path / "nothing")
    (directory / "latest").unlink()
    (directory / "latest").symlink_to(big / "step_4")
    (directory / "best").symlink_to(tmp_path / "nothing")
    save(one, 8, 9)
    assert names(directory) == {"best", "latest", "step_8", "step_9"}
    assert reader.load(directory)[1]["step"] == 9
    assert not (directory / "step_8").is_symlink()
    assert reader.verify(big / "step_4") == ""
    assert said == []


def test_what_cannot_be_deleted_is_said_once_and_keeps_nothing_else(
    one: Writer, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename, rmtree = tmp_path / "checkpoints", Path.rename, shutil.rmtree

    def renamed(path: Path, target: Path) -> Path:
        if path.name == "step_1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    def removed(path: Path, ignore_errors: bool = False, **rest: Any) -> None:
        if path.name.startswith(".step_2."):
            if not ignore_errors:
                raise OSError(errno.EACCES, "Permission denied")
        else:
            rmtree(path, ignore_errors, **rest)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    save(one, *range(1, 9))
    assert names(directory) == {"latest", "step_1", ".step_2.deleted-1", "step_7", "step_8"}
    assert said == [
        (
            "checkpoints: step_1 cannot be deleted (Device or resource busy) and still takes its"
            " room; delete it yourself"
        ),
        (
            "checkpoints: step_2 cannot be deleted (Permission denied) and still takes its room;"
            " delete it yourself"
        ),
    ]
    said.clear()
    Writer(directory, Dist(), said.append).close()
    assert said == [
        "checkpoints: .step_2.deleted-1 cannot be deleted (Permission denied) and still takes its"
        " room; delete it yourself"
    ]


def test_a_file_or_folder_in_the_way_gets_another_name(
    one: Writer, said: list[str], tmp_path: Path
) -> None:
    """As checkpoints of the published code are: files named by their steps."""
    directory = tmp_path / "checkpoints"
    (directory / "step_7").write_text("a user's")
    (directory / "latest").mkdir()
    save(one, 7, 8, 9, 10)
    assert names(directory) == {"latest", "step_9", "step_10", "step_7.old-1", "latest.old-1"}
    assert (directory / "step_7.old-1").read_text() == "a user's"
    assert said == [
        f"checkpoints: {name} was in the way and is now {name}.old-1"
        for name in ("step_7", "latest")
    ]


def test_checkpoints_under_their_aside_names_alone(one: Writer, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(one, 5, 6)
    for step in (5, 6):
        (directory / f"step_{step}").rename(directory / f".step_{step}.replaced")
    (directory / "step_5").write_text("a user's")
    Writer(directory, Dist(), pytest.fail).close()
    assert reader.newest_whole(directory, pytest.fail) == directory / "step_6"
    assert reader.newest_whole(directory, pytest.fail, before=6) == directory / "step_5"
    save(one, 7, 8)
    assert names(directory) == {"latest", "step_5", "step_7", "step_8"}


def test_a_run_directory_that_is_gone_does_not_come_back(said: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    one = Writer(directory, Dist(), said.append)
    save(one, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    one.save(2, groups(2.0), {}, META)
    assert one.wait() == f"rank 0: {directory} is not there: deleted, or moved away"
    assert one.failures == 1
    assert said == [
        f"checkpoint of step 2 FAILED on {one.wait()}; training goes on, there is no whole one yet"
    ]
    assert names(tmp_path) == {"moved"}
    (tmp_path / "moved").rename(tmp_path / "run")
    save(one, 3)


# --- readers beside a run that goes on


def beside(
    monkeypatch: pytest.MonkeyPatch, directory: Path, times: int, owner: Any, name: str
) -> None:
    """A run that saves its next step, and deletes the one before, whenever somebody comes to
    read.
    """
    real, steps = getattr(owner, name), iter(range(51, 51 + times))

    def late(folder: Path, *rest: Any, **named: Any) -> Any:
        if (step := next(steps, None)) is not None:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, real)
                alone(directory, step, keep=1)
        return real(folder, *rest, **named)

    monkeypatch.setattr(owner, name, late)


def pass_over(path: Path) -> int:
    folder = reader.newest_whole(path / "checkpoints", pytest.fail)
    assert folder is not None
    return reader.read_meta(folder)["step"]


def digested(path: Path) -> int:
    digest = reader.digest(path)
    return next(
        step for step in (50, 51, 52) if digest == reader.digest(alone(path / "compared", step))
    )


def from_shards(path: Path) -> int:
    return int(reader.load_shards(path, [0])[0]["state/0"][0, 0])


READERS: list[Callable[[Path], int]] = [
    pass_over,
    digested,
    from_shards,
    lambda path: reader.load(path)[1]["step"],
    lambda path: reader.read_meta(path)["step"],
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("owner", "name"), [(manifest, "damage"), (stepfolders, "read_pointer"), (contents, "problem")]
)
def test_a_reader_takes_the_newest_that_is_there_then(
    read: Callable[[Path], int],
    owner: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone(tmp_path / "checkpoints", 50)
    owner = reader if name == "read_pointer" else owner
    beside(monkeypatch, tmp_path / "checkpoints", 2, owner, name)
    assert read(tmp_path) in (50, 51, 52)
    assert names(tmp_path / "checkpoints") <= {"latest", "step_50", "step_51", "step_52"}


@pytest.mark.parametrize("read", [pass_over, digested, reader.load])
def test_a_reader_gives_up_in_one_line(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(tmp_path / "checkpoints", 50)
    beside(monkeypatch, tmp_path / "checkpoints", 9, manifest, "damage")
    with pytest.raises(
        ConfigError,
        match=r"^checkpoint=[^\n]*: 5 of them were deleted while they were read; copy one[^\n]*$",
    ):
        read(tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder"):
        reader.load(tmp_path / "checkpoints" / "step_50")


def test_the_same_step_written_anew_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(tmp_path / "checkpoints", 50, value=1.0)
    real, written = manifest._read, iter([True])

    def late(folder: Path) -> Any:
        files = real(folder)
        if next(written, False):
            alone(tmp_path / "checkpoints", 50, value=2.0)
        return files

    monkeypatch.setattr(manifest, "_read", late)
    assert torch.equal(reader.load(tmp_path)[0]["model"]["weight"], groups(2.0)["model"]["weight"])


def test_files_of_two_checkpoints_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody compares them with the manifest: the step is written anew between two of
    its files.
    """
    alone(tmp_path / "checkpoints", 50, value=1.0)
    real, written = reader.read_all, iter([True])

    def late(*args: Any) -> Any:
        tensors = real(*args)
        if next(written, False):
            alone(tmp_path / "checkpoints", 50, value=2.0)
        return tensors

    monkeypatch.setattr(reader, "read_all", late)
    loaded = reader.load(tmp_path, ["model", "ema"])[0]
    assert {group["weight"].max().item() for group in loaded.values()} == {2.0}


def test_a_crash_before_the_pointers_are_renamed_loses_no_best(tmp_path: Path) -> None:
    """The resumed run believes that the best is saved, so the pointer must be there."""
    alone(tmp_path, 5, best=True)
    (tmp_path / "best").rename(tmp_path / ".best.writing")
    (tmp_path / ".step_5.replaced").mkdir()
    (tmp_path / ".step_9.writing-x-1").mkdir()
    alone(tmp_path, 6, keep=1)
    assert stepfolders.read_pointer(tmp_path / "best") == "step_5"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "latest",
        "step_5",
        "step_6",
    ]
