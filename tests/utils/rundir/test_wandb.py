"""W&B never prompts and never holds up the end of a run; tests/test_disk_and_wandb_failures.py has
its death in a run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import until
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.wandb_log import Tracker, resolve_mode


def begun(folder: Path, **settings: object) -> RunDirectory:
    run = RunDirectory(folder, Dist()).__enter__()
    run.begin("lr: 0.001\n", {"mode": "offline", "project": "p", "name": "n", **settings})
    return run


@pytest.mark.parametrize(
    ("mode", "env", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "nonsense"}, "auto"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
    ],
)
def test_modes(mode: str, env: dict[str, str], expected: str) -> None:
    assert resolve_mode(mode, env) == expected


def test_a_finish_that_hangs_holds_up_nothing() -> None:
    said: list[str] = []
    tracker = Tracker(said.append, patience_s=0.2)
    tracker._run = SimpleNamespace(finish=lambda exit_code: time.sleep(60))
    began = time.monotonic()
    tracker.close(ok=True)
    assert time.monotonic() - began < 10
    assert said[0].startswith("W&B: did not finish within 0.2 s")


@pytest.mark.slow
def test_the_real_package_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without credentials: quiet, and all within the run directory, to be continued there."""
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = begun(tmp_path / "x", mode="auto")
    run.log(1, {"loss": 1.0})
    run.close()
    again = begun(tmp_path / "x", mode="auto", id=run.wandb_id)
    again.close()
    for folder in ("x", "x.old-1"):
        (file,) = (tmp_path / folder / "wandb").glob(f"offline-run-*-{run.wandb_id}/run-*.wandb")
        assert until(lambda file=file: file.stat().st_size > 100), "W&B's process writes it"
    assert not list(tmp_path.rglob("requirements.txt"))
    assert capfd.readouterr() == ("the former run of this name is now x.old-1\n", "")
