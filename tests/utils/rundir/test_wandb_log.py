"""W&B never prompts, never fails a run, and says once what went wrong."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.ranks.distributed import Dist
from utils.rundir import wandb_log
from utils.rundir.directory import Run
from utils.rundir.wandb_log import has_credentials, resolve_mode

KEY = {"WANDB_API_KEY": "k" * 40}
OFFLINE = {"mode": "offline", "project": "p", "name": "n"}
CONFIG = "lr: 0.001\narch: {name: trm}\n"


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
    id = "new-id"

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


def begun(folder: Path, timeout_s: float = 600.0, **settings: object) -> Run:
    run = Run(folder, Dist(timeout_s=timeout_s))
    run.begin(CONFIG, {**OFFLINE, **settings})
    return run


def use(fake: FakeWandb | None, folder: Path, monkeypatch: pytest.MonkeyPatch, ok: bool = True) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = begun(folder)
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
    assert "id" not in fake.given
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


class NoNetwork(FakeWandb):
    """Fails online, and offline too where it is told to."""

    def __init__(self, offline: str = "") -> None:
        super().__init__()
        self.offline, self.modes = offline, []

    def init(self, **given: object) -> FakeRun:
        self.modes.append((given["mode"], given.get("id")))
        self.failing = "init" if given["mode"] == "online" else self.offline
        return super().init(**given)


def test_what_cannot_start_online_is_recorded_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY["WANDB_API_KEY"])
    monkeypatch.setitem(sys.modules, "wandb", fake := NoNetwork())
    with begun(tmp_path / "x", mode="auto", id="former") as run:
        run.log(1, {"loss": 1.0})
        assert run.wandb_id == "new-id"
    assert fake.modes == [("online", "former"), ("offline", "former")]
    names = [name for name, _ in fake.calls]
    assert names == ["init", "teardown", "init", "log", "finish", "teardown"]
    remark = "W&B: could not start (the server is on fire); recording offline, `wandb sync` uploads it\n"
    assert capsys.readouterr().out == remark
    monkeypatch.setitem(sys.modules, "wandb", NoNetwork("init"))
    with begun(tmp_path / "y", mode="auto"):
        assert capsys.readouterr().out == remark + "W&B: could not start (the server is on fire); off for this run\n"


def test_a_network_that_hangs_takes_no_longer_than_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    """The start that hangs may come to its end later; then it must not end the other one."""
    monkeypatch.setenv("WANDB_API_KEY", KEY["WANDB_API_KEY"])
    monkeypatch.setitem(sys.modules, "wandb", fake := NoNetwork())
    start = fake.init
    monkeypatch.setattr(fake, "init", lambda **given: stuck() if given["mode"] == "online" else start(**given))
    began = time.monotonic()
    with begun(tmp_path / "x", timeout_s=1.0, mode="auto") as run:
        assert time.monotonic() - began < 0.5
        stuck.released.set()
        time.sleep(0.1)
        run.log(1, {"loss": 1.0})
    assert fake.calls == [("init", None), ("log", 1), ("finish", 0), ("teardown", None)]
    assert capsys.readouterr().out == "W&B: did not start within 0.3 s; recording offline, `wandb sync` uploads it\n"
    monkeypatch.setattr(fake, "init", stuck)
    stuck.released.clear()
    began = time.monotonic()
    begun(tmp_path / "y", timeout_s=1.0, mode="auto").close()
    assert time.monotonic() - began < 0.7


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(None, tmp_path / "x", monkeypatch)
    assert capsys.readouterr().out.startswith("W&B: the package is not installed; off for this run")


def test_a_continued_run_is_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with begun(tmp_path / "x") as run:
        assert run.wandb_id == "new-id"
    with begun(tmp_path / "y", id="old-id") as run:
        assert (fake.given["id"], fake.given["resume"]) == ("old-id", "allow")
    fake.failing = "init"
    for settings in ({}, {"mode": "disabled"}):  # the job after this one may go on with it all the same
        with begun(tmp_path / "z", id="old-id", **settings) as run:
            assert run.wandb_id == "old-id"
    assert Run(tmp_path, Dist(1, 2)).wandb_id is None


class Stuck:
    """Something of W&B that does not answer before it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, *given: object, **named: object) -> None:
        self.entered.set()
        self.released.wait(30)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    stuck = Stuck()
    yield stuck
    stuck.released.set()
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(5)
            assert not thread.is_alive()  # it ends once it can


def test_a_hanging_start_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeWandb, "init", stuck)
    monkeypatch.setattr(wandb_log, "START_S", 0.1)
    begun(tmp_path).close()
    assert capsys.readouterr().out == "W&B: did not start within 0.1 s; off for this run\n"


def test_a_hanging_start_is_left_behind_before_other_ranks_give_rank_0_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeWandb, "init", stuck)
    begun(tmp_path, timeout_s=0.2).close()
    assert capsys.readouterr().out == "W&B: did not start within 0.1 s; off for this run\n"


def test_a_hanging_log_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeRun, "log", stuck)
    monkeypatch.setattr(wandb_log, "STALL_S", 0.2)
    began = time.monotonic()
    with begun(tmp_path) as run:
        for step in range(100):
            run.log(step, {"loss": 1.0})
        assert capsys.readouterr().out == ""
        time.sleep(0.3)
        for step in range(100, 200):
            run.log(step, {"loss": 1.0})
    assert time.monotonic() - began < 2
    assert capsys.readouterr().out == "W&B: has not answered for 0.2 s; off for this run\n"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 200


def test_rows_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeRun, "log", stuck)
    monkeypatch.setattr(wandb_log, "QUEUE", 3)
    with begun(tmp_path) as run:
        run.log(0, {"loss": 1.0})
        assert stuck.entered.wait(5)
        for step in range(1, 9):
            run.log(step, {"loss": 1.0})
    assert capsys.readouterr().out == "W&B: is 3 rows behind; off for this run\n"


def test_a_slow_log_keeps_the_order_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def slow(self: FakeRun, metrics: dict, step: int) -> None:
        time.sleep(0.01)
        fake.note("log", step)

    monkeypatch.setattr(FakeRun, "log", slow)
    with begun(tmp_path) as run:
        for step in range(20):
            run.log(step, {})
    assert fake.calls == [("init", None), *(("log", step) for step in range(20)), ("finish", 0), ("teardown", None)]


@pytest.mark.parametrize("hurry", [False, True])
def test_a_hanging_finish_is_left_behind(
    hurry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeRun, "finish", stuck)
    monkeypatch.setattr(wandb_log, "HURRY_S" if hurry else "FINISH_S", 0.1)
    begun(tmp_path).close(hurry=hurry)
    assert capsys.readouterr().out.startswith("W&B: did not finish within 0.1 s")


def test_a_hanging_finish_does_not_hold_up_the_next_job_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: Stuck
) -> None:
    monkeypatch.setattr(FakeRun, "finish", stuck)
    begun(tmp_path, timeout_s=0.6).close()
    assert capsys.readouterr().out.startswith("W&B: did not finish within 0.3 s")
