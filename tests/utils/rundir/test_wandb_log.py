"""W&B never prompts, never holds up a step, never fails a run, and what went wrong is said once:
with a package that fails at will.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.ranks import ROOT, until
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.rundir import wandb_log
from utils.rundir.directory import RunDirectory
from utils.rundir.wandb_log import resolve_mode

OFFLINE = {"mode": "offline", "project": "p", "name": "n"}
CONFIG = "lr: 0.001\narch: {name: trm}\n"

# In place of the package, on the path of W&B's process: it notes what is asked of it, and does as
# FAKE_WANDB says: "log:fail" or "init online:hang", one of them or several.
FAKE = """
import json, os, sys, time, types

class UsageError(Exception):
    pass

errors = types.SimpleNamespace(UsageError=UsageError)

def note(name, detail=None):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps([name, detail]) + "\\n")
    print("W&B speaks", file=sys.stderr, flush=True)
    print("W&B speaks", flush=True)
    for rule in os.environ.get("FAKE_WANDB", "").split(","):
        where, _, what = rule.partition(":")
        if where in (name, f"{name} {detail['mode']}" if name == "init" else name):
            if what == "fail":
                raise RuntimeError("the server\\nis on fire")
            if what == "key":
                raise UsageError("no key")
            if what == "die":
                os._exit(3)
            time.sleep(60 if what == "hang" else float(what))

class Run:
    def log(self, metrics, step):
        note("log", [step, metrics])

    def finish(self, exit_code):
        note("finish", exit_code)

def init(**given):
    note("init", given)
    return Run()

def teardown():
    note("teardown")
"""


class Fake:
    """The calls to the package, as its process noted them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self._set = folder / "calls", monkeypatch.setenv
        (folder / "path" / "wandb").mkdir(parents=True)
        (folder / "path" / "wandb" / "__init__.py").write_text(FAKE)
        self._set("PYTHONPATH", str(folder / "path"))
        self._set("FAKE_CALLS", str(self.file))

    def does(self, rules: str) -> None:
        self._set("FAKE_WANDB", rules)
        self.file.unlink(missing_ok=True)

    @property
    def calls(self) -> list[tuple]:
        return (
            [tuple(json.loads(line)) for line in self.file.read_text().splitlines()]
            if self.file.exists()
            else []
        )

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path / "fake", monkeypatch)


def begun(folder: Path, timeout_s: float = 600.0, **settings: object) -> RunDirectory:
    run = RunDirectory(folder, Dist(timeout_s=timeout_s))
    run.begin(CONFIG, {**OFFLINE, **settings})
    return run


@pytest.mark.parametrize(
    ("mode", "env", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_DISABLED": "true"}, "disabled"),
        ("auto", {"WANDB_MODE": "nonsense"}, "auto"),
        ("auto", {"WANDB_MODE": "run"}, "online"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
        ("disabled", {"WANDB_MODE": "online"}, "disabled"),
    ],
)
def test_modes(mode: str, env: dict[str, str], expected: str) -> None:
    assert resolve_mode(mode, env) == expected


def test_a_mode_that_is_none() -> None:
    with pytest.raises(
        ConfigError, match=r"^wandb.mode=maybe: choose one of auto, online, offline, disabled$"
    ):
        resolve_mode("maybe", {})


@pytest.mark.parametrize("ok", [True, False])
def test_a_run_is_recorded(
    ok: bool, tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.does("log:0.002")
    run = begun(tmp_path / "x")
    run.log(1, {"loss": 0.5, "up": float("inf")})
    assert until(lambda: "log" in fake.names, 20), "while the run goes on"
    for step in range(2, 200):
        run.log(step, {"loss": float("nan")})
    run.close(ok)
    (_, given), *calls = fake.calls
    named = {
        "project": "p",
        "name": "n",
        "mode": "offline",
        "dir": str(tmp_path / "x"),
        "id": run.wandb_id,
        "resume": "allow",
    }
    assert given == named | {"config": {"lr": 0.001, "arch": {"name": "trm"}}}
    expected = [
        ("log", [1, {"loss": 0.5, "up": float("nan")}]),
        *(("log", [step, {"loss": float("nan")}]) for step in range(2, 200)),
    ]
    assert repr([*expected, ("finish", 0 if ok else 1), ("teardown", None)]) == repr(calls)
    assert capfd.readouterr() == ("", ""), "W&B itself is not heard"


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failure_is_said_once(
    where: str, tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.does(f"{where}:fail")
    run = begun(tmp_path / "x")
    for step in (1, 2, 3):
        run.log(step, {"loss": 1.0})
    if where != "finish":
        assert until(lambda: "teardown" in fake.names, 20)
        assert until(
            lambda: run.log(4, {}) or "on fire" in (tmp_path / "x" / "log.txt").read_text(), 20
        ), "as soon as it happens"
    run.close()
    what = "start" if where == "init" else where
    assert capfd.readouterr() == (
        f"W&B: could not {what} (the server is on fire); off for this run\n",
        "",
    )
    assert fake.names.count(where) == 1
    assert fake.names[-1] == "teardown"


def test_a_process_that_dies_is_said(
    tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.does("log:die")
    run = begun(tmp_path / "x")
    run.log(1, {"loss": 1.0})
    run.close()
    assert capfd.readouterr() == ("W&B: its process ended with status 3; off for this run\n", "")


REMARK = (
    "W&B: could not start (the server is on fire); recording offline, `wandb sync` uploads it\n"
)


@pytest.mark.parametrize(
    ("mode", "rules", "said"),
    [
        ("online", "init online:fail", REMARK),
        ("auto", "init online:fail", REMARK),
        ("auto", "init online:key", ""),
        (
            "online",
            "init online:key",
            "W&B: could not start (no key); recording offline, `wandb sync` uploads it\n",
        ),
        (
            "auto",
            "init:fail",
            REMARK + "W&B: could not start (the server is on fire); off for this run\n",
        ),
    ],
)
def test_what_cannot_start_online_is_recorded_offline(
    mode: str, rules: str, said: str, tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.does(rules)
    with begun(tmp_path / "x", mode=mode, id="former") as run:
        run.log(1, {"loss": 1.0})
        assert run.wandb_id == "former"
    modes = [(given["mode"], given["id"]) for name, given in fake.calls if name == "init"]
    assert modes == [("online", "former"), ("offline", "former")]
    assert fake.names[:3] == ["init", "teardown", "init"]
    assert fake.names[3:] == (["teardown"] if "init:" in rules else ["log", "finish", "teardown"])
    assert capfd.readouterr() == (said, "")


def test_no_package(tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake" / "path" / "wandb" / "__init__.py").write_text("import nothing_of_this_name")
    begun(tmp_path / "x").close()
    assert capfd.readouterr() == (
        "W&B: could not start (No module named 'nothing_of_this_name'); off for this run\n",
        "",
    )


def test_a_process_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    begun(tmp_path / "x").close()
    assert capfd.readouterr() == (
        "W&B: could not start (No such file or directory); off for this run\n",
        "",
    )


def test_a_continued_run_is_the_same_one(tmp_path: Path, fake: Fake) -> None:
    with begun(tmp_path / "x") as run:
        run.log(1, {"loss": 1.0})
        run.log(2, {"loss": 1.0})
        new = run.wandb_id
    fake.does("")
    with RunDirectory(tmp_path / "x", Dist()) as run:
        run.begin(CONFIG, {**OFFLINE, "id": new}, resumed=2)
        run.log(3, {"loss": 1.0})
        assert run.wandb_id == new
    assert [(name, detail[0]) for name, detail in fake.calls if name == "log"] == [("log", 3)], (
        "W&B has the others"
    )
    assert fake.calls[0][1]["id"] == new
    fake.does("init:fail")
    for settings in ({}, {"mode": "disabled"}):  # a later start may go on with it all the same
        with begun(tmp_path / "z", id="old-id", **settings) as run:
            assert run.wandb_id == "old-id"
    with begun(tmp_path / "z", mode="disabled") as run:
        assert run.wandb_id is None


@pytest.mark.parametrize("where", ["init", "log", "finish"])
@pytest.mark.parametrize("within", ["FINISH_S", "HURRY_S", "timeout_s"])
def test_what_hangs_holds_up_nothing(
    where: str,
    within: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake: Fake,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither the steps, nor the end for longer than other ranks wait for this one, nor a run that
    is asked to stop.
    """
    fake.does(f"{where}:hang")
    if within != "timeout_s":
        monkeypatch.setattr(wandb_log, within, 0.6)
    began = time.monotonic()
    with closing(begun(tmp_path / "x", timeout_s=1.2 if within == "timeout_s" else 600)) as run:
        for step in range(100):
            run.log(step, {"loss": 1.0})
        process = run._tracker._process
        assert process is not None
        assert until(lambda: where == "finish" or where in fake.names, 20)
        run.close(hurry=within == "HURRY_S")
    assert time.monotonic() - began < 30, "it hangs for 60 s"
    assert not running(process.pid)
    assert capfd.readouterr() == (
        (
            "W&B: did not finish within 0.6 s and was ended; `wandb sync` uploads what its files"
            " hold\n"
        ),
        "",
    )
    assert (tmp_path / "x" / "metrics.jsonl").read_text().count("\n") == 100


KILLED = """
import sys, time; from pathlib import Path
from utils.rundir.wandb_log import Tracker
tracker = Tracker(print, 60)
tracker.start(Path(sys.argv[1]), "offline", None, None, None)
print(tracker._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("hangs", ["", "init:hang", "finish:hang"])
def test_a_run_that_is_killed_is_recorded_as_failed_and_leaves_nothing(
    hangs: str, tmp_path: Path, fake: Fake
) -> None:
    """Nor does it hold open what somebody reads to its end."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "metrics.jsonl").touch()
    fake.does(hangs)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert until(lambda: "init" in fake.names, 20)
        os.kill(run.pid, signal.SIGKILL)
        assert run.stdout.read() == ""
        assert hangs == "" or running(pid), "it does not wait for that process"
    assert until(lambda: not running(pid), wandb_log.HURRY_S + 20)
    assert ("finish", 1) in fake.calls or hangs == "init:hang"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    """A full disk takes half of one, which the run takes back."""
    logged: list[int] = []

    class Sink:
        def log(self, metrics: dict, step: int) -> None:
            logged.append(step)

    with (
        open(tmp_path / "rows", "wb", buffering=0) as writer,
        open(tmp_path / "rows", "rb", buffering=0) as reader,
    ):
        for text, expected in (('{"step": 1, "time": 0}\n{"st', [1]), ("", [1])):
            writer.write(text.encode())
            wandb_log.copy(reader, Sink(), tmp_path)
            assert logged == expected
        writer.truncate(writer.seek(-4, os.SEEK_END))
        writer.write(b'{"step": 2, "time": 0}\n')
        wandb_log.copy(reader, Sink(), tmp_path)
    assert logged == [1, 2]


def test_pictures_of_an_evaluation_go_with_its_row(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from PIL import Image

    logged: list[tuple[int, dict]] = []

    class Sink:
        def log(self, metrics: dict, step: int) -> None:
            logged.append((step, metrics))

    folder = tmp_path / "evaluations" / "step_4" / "val"
    folder.mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(folder / "gates.png")
    rows = [{"step": 4, "time": 0, "train/loss": 1.0}, {"step": 4, "time": 0, "eval/l0": 2.0}]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(tmp_path / "rows", "rb", buffering=0) as reader:
        wandb_log.copy(reader, Sink(), tmp_path)
    assert [(step, [*metrics]) for step, metrics in logged] == [
        (4, ["train/loss"]),
        (4, ["eval/l0", "pictures/val/gates"]),
    ]
