"""Loggers are guests. Stand-ins have the signatures of trackio and of PyTorch's SummaryWriter."""

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.loggers import Loggers

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that the stand-ins have received."""
    made: Calls = []

    class Run:
        def log(self, metrics: dict, step: int | None = None) -> None:
            made.append(("log", metrics, step))

        def finish(self) -> None:
            made.append(("finish",))

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        space_storage: Any = None,
        dataset_id: str | None = None,
        config: dict | None = None,
        resume: str = "never",
        settings: Any = None,
    ) -> Run:
        assert resume in ("must", "allow", "never")
        print(f"* Trackio project initialized: {project}")
        made.append(("init", project, name, config, resume))
        return Run()

    class SummaryWriter:
        def __init__(
            self, log_dir: str | None = None, comment: str = "", purge_step: int | None = None
        ) -> None:
            made.append(("writer", log_dir, purge_step))

        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            made.append(("scalar", tag, scalar_value, global_step))

        def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
            made.append(("text", tag, text_string))

        def close(self) -> None:
            made.append(("close",))

    for name, member in (("trackio", init), ("torch.utils.tensorboard", SummaryWriter)):
        module = ModuleType(name)
        setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def begun(folder: Path, *names: str, resumed: int | None = None) -> RunDirectory:
    run = RunDirectory(folder, Dist()).__enter__()
    settings = {"log": names, "mode": "disabled", "project": "p", "name": "n"}
    run.begin("lr: 0.001\n", settings, resumed, facts={"parameters": 7})
    return run


def test_trackio(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begun(tmp_path / "x", "wandb", "trackio")
    run.log(3, {"loss": 1.0})
    run.close()
    init, log, finish = calls
    assert init[:3] == ("init", "p", "n")
    assert (init[3]["lr"], init[3]["num_params"], init[4]) == (0.001, 7, "never")
    assert (log, finish) == (("log", {"loss": 1.0}, 3), ("finish",))
    assert capsys.readouterr().out == "trackio: `trackio show --project p` shows the run\n"


def test_tensorboard(calls: Calls, tmp_path: Path) -> None:
    begun(tmp_path / "x", "tensorboard").close()
    run = begun(tmp_path / "x", "tensorboard", resumed=4)
    run.log(5, {"loss": float("nan"), "lr": 0.1})
    run.close()
    folder = str(tmp_path / "x" / "tensorboard")
    assert calls[0] == ("writer", folder, None)
    assert calls[1][:2] == ("text", "config")
    assert "lr: 0.001" in calls[1][2]
    assert calls[2:4] == [("close",), ("writer", folder, 5)]
    assert [call[:2] for call in calls[5:7]] == [("scalar", "loss"), ("scalar", "lr")]
    assert calls[7:] == [("close",)]


@pytest.mark.parametrize("failure", [OSError, SystemExit])
def test_a_logger_that_fails_is_off_and_the_others_go_on(
    failure: type, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise failure("no disk")

    run = begun(tmp_path / "x", "trackio", "tensorboard")
    run._loggers._open["trackio"].log = broken
    for step in (1, 2):
        run.log(step, {"loss": 1.0})
    assert [call[-1] for call in calls if call[0] == "scalar"] == [1, 2]
    run._loggers._open["TensorBoard"].finish = broken
    run.close()
    vars(sys.modules["trackio"])["init"] = broken
    begun(tmp_path / "y", "trackio").close()
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "trackio: could not log (no disk); off for this run",
        "TensorBoard: could not finish (no disk)",
        "trackio: could not start (no disk); off for this run",
    ]


def test_a_finish_that_hangs_holds_up_nothing() -> None:
    said: list[str] = []
    loggers = Loggers(said.append, patience_s=0.2)
    loggers._open["W&B"] = SimpleNamespace(finish=lambda ok: time.sleep(60))
    began = time.monotonic()
    loggers.close(ok=True)
    assert time.monotonic() - began < 10
    assert said[0].startswith("W&B: did not finish within 0.2 s")


def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    begun(tmp_path / "x", "trackio").close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("trackio: not installed (")
    assert line.endswith("; pip install trackio")
