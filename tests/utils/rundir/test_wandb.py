"""W&B never prompts, never fails a run and never holds up its end; what went wrong is said once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import until
from utils.ranks.distributed import Dist
from utils.rundir import wandb_log
from utils.rundir.directory import RunDirectory
from utils.rundir.wandb_log import resolve_mode


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


class Fake:
    """In place of the package: notes what is asked of it, and fails or hangs where told."""

    class UsageError(Exception):
        pass

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails: set[str] = set()
        self.errors = SimpleNamespace(UsageError=self.UsageError)

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def _do(self, name: str, detail: Any) -> None:
        self.calls.append((name, detail))
        if "key" in self.fails and detail == "online":
            raise self.UsageError("no key")
        if name in self.fails or f"{name} {detail}" in self.fails:
            raise RuntimeError("the server\nis on fire")
        if f"{name} hangs" in self.fails:
            time.sleep(60)

    def init(self, **given: Any) -> Fake:
        self._do("init", given["mode"])
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self._do("log", (step, row))

    def finish(self, exit_code: int) -> None:
        self._do("finish", exit_code)

    def teardown(self) -> None:
        self._do("teardown", None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setitem(sys.modules, "wandb", package := Fake())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return package


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failure_is_said_once(
    where: str, tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.fails = {where}
    with begun(tmp_path / "x") as run:
        for step in range(3):
            run.log(step, {"loss": 1.0})
        wandb_id = run.wandb_id
    assert wandb_id, "a later start continues it"
    said = capfd.readouterr().out
    assert said.startswith("W&B: could not ")
    assert said.count("\n") == 1
    assert (tmp_path / "x" / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("mode", "fails", "said"),
    [("auto", "key", 0), ("online", "key", 1), ("auto", "init online", 1)],
)
def test_what_cannot_start_online_is_recorded_offline(
    mode: str, fails: str, said: int, tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.fails = {fails}
    begun(tmp_path / "x", mode=mode).close()
    assert [call for call in fake.calls if call[0] != "finish"] == [
        ("init", "online"),
        ("teardown", None),
        ("init", "offline"),
    ]
    assert capfd.readouterr().out.count("recording offline") == said


def test_a_finish_that_hangs_holds_up_nothing(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.fails = {"finish hangs"}
    monkeypatch.setattr(wandb_log, "FINISH_S", 0.2)
    began = time.monotonic()
    begun(tmp_path / "x").close()
    assert time.monotonic() - began < 10
    assert capfd.readouterr().out.startswith("W&B: did not finish within 0.2 s")


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
