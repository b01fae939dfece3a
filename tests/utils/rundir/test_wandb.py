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
from tests.ranks import until
from tests.utils.rundir.test_wandb_log import begun
from utils.rundir import wandb_log


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The real package, with a home directory of its own and no network; nothing that was started
    with it lives on.
    """
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    left = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"HOME={home}\0".encode() in content(path)
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # of another user, or gone
        return b""


def recorded(run: Path, pattern: str) -> int:
    """Bytes of the one file that `wandb sync` would upload."""
    (file,) = (run / "wandb").glob(f"{pattern}/run-*.wandb")
    return file.stat().st_size


def test_the_real_package_offline(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "x", mode="auto")  # without credentials
    run.log(1, {"loss": 1.0})
    run.close()
    again = begun(tmp_path / "x", mode="auto", id=run.wandb_id)
    assert again.wandb_id == run.wandb_id
    again.close()
    for folder in ("x", "x.old-1"):
        assert recorded(tmp_path / folder, f"offline-run-*-{run.wandb_id}") > 100
    assert not list(tmp_path.rglob("*.py"))
    assert not list(tmp_path.rglob("requirements.txt"))
    # which W&B has in the home directory by itself
    assert list((tmp_path / "x" / "wandb" / "logs").glob("core-debug-*"))
    assert not list(home.iterdir())
    assert capfd.readouterr() == ("the former run of this name is now x.old-1\n", "")


@pytest.mark.parametrize(
    "netrc", ["machine wandb.example login user password " + 40 * "a", "machine = nonsense {"]
)
def test_credentials_for_another_host_are_none(
    netrc: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And it asks nobody: neither for a key, nor the server."""
    (home / ".netrc").write_text(netrc)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        begun(tmp_path / "x", mode="auto").close()
        with pytest.raises(TimeoutError):
            server.accept()
    assert recorded(tmp_path / "x", "offline-run-*") > 100
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_its_process_dies_or_hangs(
    signum: signal.Signals,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if signum == signal.SIGSTOP:
        monkeypatch.setattr(wandb_log, "FINISH_S", 1.0)
    with begun(tmp_path / "x") as run:
        run.log(0, {"loss": 1.0})
        assert until(
            lambda: bool(list((tmp_path / "x" / "wandb").glob("offline-run-*/*.wandb"))), 20
        )
        time.sleep(1.0)  # it has begun to log
        (service,) = wandb_services()
        os.kill(service, signum)
        began = time.monotonic()
        for step in range(1, 100):
            run.log(step, {"loss": 1.0})
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 25
    said = capfd.readouterr()
    assert said.out.startswith(
        "W&B: could not log (" if signum == signal.SIGKILL else "W&B: did not finish within 1 s"
    )
    assert (said.out.count("\n"), said.err) == (1, "")
    assert (tmp_path / "x" / "metrics.jsonl").read_text().count("\n") == 100


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_does_not_answer(
    listens: bool,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        if listens:
            server.listen(50)
            monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        else:
            (home / ".netrc").write_text(
                f"machine 127.0.0.1:{server.getsockname()[1]} login user password {'a' * 40}\n"
            )
        began = time.monotonic()
        with begun(tmp_path / "x", mode="auto", id="former") as run:
            assert time.monotonic() - began < 10, "steps do not wait"
            run.log(1, {"loss": 1.0})
            assert run.wandb_id == "former"
    assert time.monotonic() - began < wandb_log.FINISH_S
    said = capfd.readouterr()
    assert said.out.startswith("W&B: could not start (")
    assert said.out.endswith("; recording offline, `wandb sync` uploads it\n")
    assert (said.out.count("\n"), said.err) == (1, "")
    assert recorded(tmp_path / "x", "offline-run-*-former") > 500
