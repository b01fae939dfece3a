"""Names of run directories, and what a run refuses to write into."""

from pathlib import Path

import pytest

from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory


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


def test_a_folder_of_other_files_is_no_runs(tmp_path: Path) -> None:
    """Whatever they are called: a run would replace or move what somebody else has written."""
    for name in ("config.yaml", "status.json", "log.txt", "notes"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with (
            pytest.raises(ConfigError, match=f"holds {name}, and no run has begun there"),
            RunDirectory(folder, Dist()),
        ):
            pass
        with RunDirectory(folder, Dist(), evaluates=True) as run:
            run.begin("seed: 0\n", {"mode": "disabled", "project": "p", "name": "n"})
        assert run.directory == folder.with_name(f"{name}-2")
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


def test_an_empty_folder_of_checkpoints_is_no_file(tmp_path: Path) -> None:
    """As somebody makes it beforehand, to put it on another disk."""
    (tmp_path / "checkpoints").mkdir()
    with RunDirectory(tmp_path, Dist()):
        pass


def test_a_hard_link_to_a_log_is_left_alone(tmp_path: Path) -> None:
    """As snapshots of a folder have them."""
    for resumed in (None, 0):
        with RunDirectory(tmp_path / "run", Dist()) as run:
            run.begin("seed: 0\n", {"mode": "disabled", "project": "p", "name": "n"}, resumed)
            run.say("said")
        if resumed is None:
            (tmp_path / "link").hardlink_to(run.directory / "log.txt")
    assert (tmp_path / "link").read_text().count("said") == 1
    assert (run.directory / "log.txt").read_text().count("said") == 2
