"""The real W&B, offline or out of reach: bounded, quiet, within the run directory."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import wandb_services
from tests.utils.rundir.test_wandb_log import begun
from utils.rundir import wandb_log


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The real package, with a home directory of its own and no network."""
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    for pid in wandb_services():  # of a test that failed
        os.kill(pid, signal.SIGKILL)


def test_the_real_package_offline(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = begun(tmp_path / "x", mode="auto")
    run.log(1, {"loss": 1.0})
    run.close()
    again = begun(tmp_path / "x", mode="auto", id=run.wandb_id)
    assert again.wandb_id == run.wandb_id
    again.close()
    for folder in ("x", "x.old-1"):
        files = list((tmp_path / folder / "wandb").glob(f"offline-run-*-{run.wandb_id}/run-*.wandb"))
        assert len(files) == 1
        assert files[0].stat().st_size > 100
    assert not list(tmp_path.rglob("*.py"))
    assert list((tmp_path / "x" / "wandb" / "logs").glob("core-debug-*"))  # which W&B has in the home directory by itself
    assert not list(home.iterdir())
    assert wandb_services() == []
    assert capfd.readouterr() == ("the former run of this name is now x.old-1\n", "")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_its_process_dies_or_hangs(
    signum: signal.Signals, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_log, "FINISH_S", 1.0)
    began = time.monotonic()
    with begun(tmp_path / "x") as run:
        run.log(0, {"loss": 1.0})
        (service,) = wandb_services()
        os.kill(service, signum)
        time.sleep(0.2)
        for step in range(1, 100):
            run.log(step, {"loss": 1.0})
            time.sleep(0.002)
        said = capfd.readouterr().out
        assert said.startswith("W&B: could not log (" if signum == signal.SIGKILL else "")
    assert time.monotonic() - began < 6
    later = capfd.readouterr()
    assert later.out.startswith("W&B: did not finish within 1 s" if signum == signal.SIGSTOP else "")
    assert ((said + later.out).count("\n"), later.err) == (1, "")
    time.sleep(0.2)
    assert wandb_services() == []  # it would hold the terminal open
    assert (tmp_path / "x" / "metrics.jsonl").read_text().count("\n") == 100


@pytest.mark.slow
def test_a_server_that_is_out_of_reach(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    began = time.monotonic()
    with begun(tmp_path / "x", mode="auto", id="former") as run:
        assert time.monotonic() - began < 22
        run.log(1, {"loss": 1.0})
        assert run.wandb_id == "former"
    assert time.monotonic() - began < 25
    said = capfd.readouterr()
    assert said.out.startswith("W&B: could not start (")
    assert said.out.endswith("; recording offline, `wandb sync` uploads it\n")
    assert (said.out.count("\n"), said.err) == (1, "")
    (recorded,) = (tmp_path / "x" / "wandb").glob("offline-run-*-former/run-former.wandb")
    assert recorded.stat().st_size > 500
    assert wandb_services() == []


@pytest.mark.slow
def test_a_server_that_does_not_answer(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other ranks wait for eight seconds, so that W&B's own patience is too long."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        begun(tmp_path / "warm", mode="disabled").close()
        began = time.monotonic()
        with begun(tmp_path / "x", timeout_s=8.0, mode="auto") as run:
            assert time.monotonic() - began < 5
            run.log(1, {"loss": 1.0})
    said = capfd.readouterr()
    assert (said.out, said.err) == ("W&B: did not start within 2.4 s; recording offline, `wandb sync` uploads it\n", "")
    (recorded,) = (tmp_path / "x" / "wandb").glob("offline-run-*/run-*.wandb")
    assert recorded.stat().st_size > 500
    assert wandb_services() == []
