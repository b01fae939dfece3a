"""status.json, and whom it keeps out; tests/test_start.py starts beside a live run."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.ranks import until
from tests.runs import status as state
from tests.utils.rundir.test_directory import opened, written
from utils.errors import ConfigError, RunError, Stopped
from utils.ranks.distributed import Dist
from utils.ranks.signals import STATUS
from utils.rundir.directory import RunDirectory
from utils.rundir.status import LOST, other_writer, started_again, state_of


def fill(folder: Path) -> None:
    """Leave no byte free on a disk."""
    with open(folder / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(512))


@pytest.mark.parametrize(
    ("signum", "began", "evaluates", "expected"),
    [
        (signal.SIGUSR1, None, False, "requeue"),
        (signal.SIGUSR1, 7, False, "stopped"),  # it would be restarted forever
        (signal.SIGUSR1, None, True, "stopped"),
        (signal.SIGTERM, 5, False, "stopped"),
    ],
)
def test_only_a_run_that_has_come_further_asks_to_be_run_again(
    signum: int,
    began: int | None,
    evaluates: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATUS", str(tmp_path / "copy.json"))
    run = RunDirectory(tmp_path / "run", Dist(), evaluates)
    run.begin("a: 1\n", {"mode": "disabled"}, began)
    with closing(run), pytest.raises(Stopped) as stopped:
        run.stop(signum, 7, "it goes on")
    assert state(run.directory) == json.loads((tmp_path / "copy.json").read_text())
    assert (state(run.directory)["state"], state(run.directory)["exit_status"]) == (
        expected,
        STATUS[signum],
    )
    assert (": to be run again; it goes on" in str(stopped.value)) == (expected == "requeue")


def elsewhere(folder: Path, age: float, launch: str = "", **changes: object) -> None:
    """A run that another host says it is doing."""
    opened(folder).close()
    told = {"state": "running", "host": "n7", "pid": 12, "heartbeat": time.time() - age}
    row = state(folder) | told | {"launch": launch} | changes
    (folder / "status.json").write_text(json.dumps(row))


def test_a_run_of_another_host_is_refused_as_long_as_it_is_heard_of(tmp_path: Path) -> None:
    elsewhere(tmp_path / "x", 55)
    assert state_of(tmp_path / "x") == "running"
    with pytest.raises(ConfigError, match=r"another run \(pid 12 on host n7\) writes there"):
        opened(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("changes", [{"heartbeat": time.time() - 65}, {"state": "stopped"}])
def test_a_run_of_another_host_that_fell_silent_is_passed_over(
    changes: dict, tmp_path: Path
) -> None:
    elsewhere(tmp_path / "x", 5, **changes)
    assert state_of(tmp_path / "x") in (LOST, "stopped")
    opened(tmp_path / "x", resumed=2).close()


ELASTIC = {"TORCHELASTIC_RUN_ID": "job9", "TORCHELASTIC_RESTART_COUNT": "1"}
REQUEUED = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("env", "launch", "ours"),
    [
        (ELASTIC, "job9", True),
        (ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "0"}, "job9", False),
        (ELASTIC | {"TORCHELASTIC_RUN_ID": "none"}, f"{socket.gethostname()} {os.getppid()}", True),
        (REQUEUED, "77", True),
        (REQUEUED, "76", False),
    ],
)
def test_what_a_launcher_starts_again_on_another_host_is_the_same_run(
    env: dict, launch: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(tmp_path / "x", 5, launch)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert started_again(tmp_path / "x") is (other_writer(tmp_path / "x") == "") is ours


def test_a_run_says_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.rundir.status.BEAT_S", 0.02)
    with closing(opened(tmp_path / "x")) as run:
        first = state(tmp_path / "x")
        run.log(7, {})
        assert until(lambda: state(tmp_path / "x")["step"] == 7, 10)
        now = state(tmp_path / "x")
        assert now["heartbeat"] > first["heartbeat"]
        assert now | {"heartbeat": 0, "step": None} == first | {"heartbeat": 0}
        run.mark("stopped", "asked", 7, 143)
        last = (tmp_path / "x" / "status.json").read_text()
        time.sleep(0.1)
        assert (tmp_path / "x" / "status.json").read_text() == last, (
            "a run that has ended says so once"
        )
    assert until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()}, 10)


@pytest.mark.parametrize("what", ["moved", "replaced"])
def test_a_directory_that_is_gone_is_found_out_and_not_made_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("utils.rundir.status.BEAT_S", 0.02)
    words = (
        f"checkpoint_path={tmp_path}/x: deleted or moved while the run was going on; put it back"
        " and start"
    )
    with closing(opened(tmp_path / "x")) as run:
        run.check_place()
        with run._status._lock:  # the heartbeat writes nothing meanwhile
            (tmp_path / "x").rename(tmp_path / "y")
            if what == "replaced":
                (tmp_path / "x").mkdir()
        time.sleep(0.1)
        run.log(1, {"loss": 1.0})
        run.mark("stopped")
        with pytest.raises(RunError, match=words):
            run.finish(1)
    assert capsys.readouterr() == ("", "")
    assert sorted(os.listdir(tmp_path)) == {"moved": ["y"], "replaced": ["x", "y"]}[what]
    assert what != "replaced" or os.listdir(tmp_path / "x") == []
    assert len(written(tmp_path / "y")) == 1


def test_a_run_that_another_has_taken_over_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken to have died: its host was out of reach, or it was suspended."""
    monkeypatch.setattr("utils.rundir.status.BEAT_S", 0.02)
    with closing(opened(tmp_path / "x")) as run:
        with run._status._lock:  # else the heartbeat might replace what it has not read
            newer = json.dumps(state(tmp_path / "x") | {"host": "n8", "pid": 5})
            (tmp_path / "x" / "status.json").write_text(newer)
        assert until(lambda: bool(run._status.lost()), 10)
        assert (
            "another run (pid 5 on host n8) has taken it over; give one of them another run_name"
            in run._status.lost()
        )
        run.mark("failed")
    assert (tmp_path / "x" / "status.json").read_text() == newer
