"""Names of run directories, and what a run refuses to write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.folders import refuse_inside


def test_no_run_lives_within_anothers_checkpoints(tmp_path: Path) -> None:
    """Which it would be deleted with, as one that is kept no longer."""
    step = tmp_path / "a" / "checkpoints" / "step_5"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (step.parent / "latest").write_text("step_5\n")
    for inside in (step, step / "new", step.parent, step.parent / "new" / "deep"):
        with pytest.raises(
            ConfigError, match=r"^checkpoint_path=.*: .* belongs to a run's checkpoints"
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
