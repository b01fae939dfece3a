"""W&B never prompts, never fails a run, and says once what went wrong."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from utils import tracking
from utils.distributed import Dist
from utils.run import Run
from utils.tracking import has_credentials, resolve_mode

KEY = {"WANDB_API_KEY": "k" * 40}


@pytest.mark.parametrize(
    ("mode", "env", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", KEY, "online"),
        ("auto", {**KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {**KEY, "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {**KEY, "WANDB_DISABLED": "true"}, "disabled"),
        ("auto", {**KEY, "WANDB_MODE": "nonsense"}, "online"),
        ("auto", {"WANDB_MODE": "online"}, "offline"),  # it would ask for a key
        ("online", {}, "offline"),
        ("online", KEY, "online"),
        ("offline", KEY, "offline"),
        ("disabled", {**KEY, "WANDB_MODE": "online"}, "disabled"),
    ],
)
def test_modes(mode: str, env: dict[str, str], expected: str, tmp_path: Path) -> None:
    resolved, remark = resolve_mode(mode, {"HOME": str(tmp_path), **env})
    assert resolved == expected
    assert bool(remark) == ("online" in (mode, env.get("WANDB_MODE")) and expected == "offline")


def test_credentials_in_netrc_count_for_their_host(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert not has_credentials(env)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_credentials(env)
    assert not has_credentials({**env, "WANDB_BASE_URL": "https://wandb.example:8080"})
    (tmp_path / "other").write_text("machine wandb.example login user password secret\n")
    assert has_credentials({**env, "NETRC": str(tmp_path / "other"), "WANDB_BASE_URL": "https://wandb.example:8080"})
    (tmp_path / ".netrc").write_text("machine = nonsense {")
    assert not has_credentials(env)


class FakeRun:
    def __init__(self, fake: FakeWandb) -> None:
        self.fake = fake

    def log(self, metrics: dict, step: int) -> None:
        self.fake.note("log", step)

    def finish(self, exit_code: int) -> None:
        self.fake.note("finish", exit_code)


class FakeWandb(types.ModuleType):
    """Records what is asked of it and fails where it is told to."""

    Settings = type("Settings", (), {"model_fields": {"silent": None}, "__init__": lambda self, **given: vars(self).update(given)})

    def __init__(self, failing: str = "") -> None:
        super().__init__("wandb")
        self.failing, self.calls, self.given = failing, [], {}

    def note(self, name: str, detail: object = None) -> None:
        self.calls.append((name, detail))
        if name == self.failing:
            raise RuntimeError("the server\nis on fire")

    def init(self, **given: object) -> FakeRun:
        self.given = given
        self.note("init")
        return FakeRun(self)

    def teardown(self) -> None:
        self.note("teardown")


def use(fake: FakeWandb | None, folder: Path, monkeypatch: pytest.MonkeyPatch, ok: bool = True) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = Run.open(folder, "lr: 0.001\narch: {name: trm}\n", Dist(), {"mode": "offline", "project": "p", "name": "n"})
    for step in (1, 2, 3):
        run.log(step, {"loss": float("nan")})
    run.close(ok)
    assert (folder / "metrics.jsonl").read_text().count("\n") == 3


def test_a_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeWandb()
    use(fake, tmp_path / "x", monkeypatch)
    assert fake.calls == [("init", None), ("log", 1), ("log", 2), ("log", 3), ("finish", 0), ("teardown", None)]
    given = {key: fake.given[key] for key in ("project", "name", "mode", "dir", "config")}
    assert given == {
        "project": "p",
        "name": "n",
        "mode": "offline",
        "dir": str(tmp_path / "x"),
        "config": {"lr": 0.001, "arch": {"name": "trm"}},
    }
    assert vars(fake.given["settings"]) == {"silent": True}  # only what this version knows
    assert capsys.readouterr().out == ""
    failed = FakeWandb()
    use(failed, tmp_path / "y", monkeypatch, ok=False)
    assert ("finish", 1) in failed.calls


@pytest.mark.parametrize(("failing", "what"), [("init", "could not start"), ("log", "could not log"), ("finish", "could not finish")])
def test_a_failure_is_said_once(
    failing: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb(failing)
    use(fake, tmp_path / "x", monkeypatch)
    assert capsys.readouterr().out == f"W&B: {what} (the server is on fire); off for this run\n"
    assert [name for name, _ in fake.calls].count(failing) == 1
    assert fake.calls[-1] == ("teardown", None)


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(None, tmp_path / "x", monkeypatch)
    assert capsys.readouterr().out.startswith("W&B: the package is not installed; off for this run")


def test_a_hanging_finish_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    released = threading.Event()
    fake = FakeWandb()
    monkeypatch.setattr(FakeRun, "finish", lambda self, exit_code: released.wait(30))
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    use(fake, tmp_path / "x", monkeypatch)
    assert "did not finish within 0.1 s" in capsys.readouterr().out
    released.set()


def test_the_real_package_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = Run.open(tmp_path / "x", "lr: 0.001\n", Dist(), {"mode": "auto", "project": "p", "name": "n"})
    run.log(1, {"loss": 1.0})
    run.close()
    files = list((tmp_path / "x" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    assert files[0].stat().st_size > 100
    assert not list((tmp_path / "x").rglob("*.py"))
    assert capfd.readouterr() == ("", "")
