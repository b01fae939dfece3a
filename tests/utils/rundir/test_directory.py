"""The run directory, what is written into it, and what is shown."""

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from utils import revision
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.folders import MARK

OFF = {"mode": "disabled", "project": "p", "name": "n"}


def opened(
    folder: Path,
    text: str = "seed: 0\n",
    resumed: int | None = None,
    evaluation_due: bool = False,
    report: bool = False,
) -> RunDirectory:
    run = RunDirectory(folder, Dist()).__enter__()
    run.begin(text, OFF, resumed, evaluation_due, report=report)
    return run


def written(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl, every line of which must be whole and strict JSON."""
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(opened(tmp_path / "p" / "x")) as run:
        run.log(1, {"train/loss": float("nan"), "up": float("inf"), "n": 3, "train/lr": 0.5})
        run.log(2, {"train/loss": 0.25})
        # flushed while the run goes on
        assert (run.directory / "metrics.jsonl").read_text().count("\n") == 2
        run.say("hello – you")
    rows = written(run.directory)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/loss"] is None
    assert rows[0]["up"] is None
    assert (rows[0]["n"], rows[0]["train/lr"], rows[1]["train/loss"]) == (3, 0.5, 0.25)
    assert rows[0]["time"] <= rows[1]["time"]
    assert (run.directory / "config.yaml").read_text() == f"{MARK}seed: 0\n"
    assert (run.directory / "log.txt").read_text(encoding="utf-8").endswith("  hello – you\n")
    assert capsys.readouterr().out == "hello – you\n"
    run.log(3, {})
    run.close()


def test_the_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*words: str) -> str:
        command = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("one\n")
    for words in ("init -q -b trunk", "add .", "commit -q -m x"):
        run_git(*words.split())
    (code / "a.py").write_text("two\n")
    (code / "new.py").write_text("three\n")
    (code / "weights.bin").write_text("")
    monkeypatch.setattr(revision, "ROOT", code)
    revision.summary.cache_clear()
    opened(tmp_path / "x").close()
    revision.summary.cache_clear()
    commit = run_git("rev-parse", "HEAD").strip()
    assert (tmp_path / "x" / "git.txt").read_text() == (
        f"revision: {commit}\nbranch: trunk\nuncommitted changes: yes\n"
    )
    diff = tmp_path / "x" / "uncommitted.diff"
    assert "weights.bin" not in diff.read_text()
    assert "?? new.py" in run_git("status", "--porcelain"), "the user's index stays as it is"
    run_git("checkout", "-q", "a.py")
    (code / "new.py").unlink()
    run_git("apply", str(diff))
    assert [(code / name).read_text() for name in ("a.py", "new.py")] == ["two\n", "three\n"]


def test_a_continued_run_keeps_its_whole_rows_up_to_the_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "x"
    with closing(opened(run, text="lr: 1")) as first:
        for step in range(1, 7):
            first.log(step, {"loss": 1 / step})
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    for name in ("metrics.jsonl", "log.txt"):
        with open(run / name, "a") as file:
            file.write('{"step": 1, "los')  # the crash came while this was being written
    with closing(opened(run, text="lr: 2", resumed=4)) as second:
        second.log(5, {"loss": 0.2})
    assert [(row["step"], row["loss"]) for row in written(run)] == [
        (step, 1 / step) for step in range(1, 6)
    ]
    assert (run / "config.yaml").read_text() == f"{MARK}lr: 2"
    assert (run / "log.txt").read_text().splitlines()[-1].endswith("  continued at step 4")
    assert "los\n" in (run / "log.txt").read_text()  # nothing is glued to it
    assert (run / "checkpoints" / "step_4").is_dir()
    assert os.listdir(tmp_path) == ["x"]
    assert not list(run.glob(".*"))
    with closing(opened(run, resumed=5)) as third:
        third.log(5, {"eval/accuracy": 0.5})
    opened(run, resumed=5, evaluation_due=True).close()
    assert len(written(run)) == 5, "an evaluation that is still due is not there twice"


@pytest.mark.parametrize(
    "content", [b"", b'{"state": "running", "pid": Infinity, "heartbeat": [1], "launch": 3}']
)
def test_garbage_in_its_files_holds_up_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MARK)
    for name in ("metrics.jsonl", "log.txt", "status.json"):
        (tmp_path / name).write_bytes(content)
    opened(tmp_path, resumed=2).close()
    assert written(tmp_path) == []
    assert json.loads((tmp_path / "status.json").read_text())["pid"] == os.getpid()


FILES = {"confusion.svg": "<svg/>", "table.csv": "a,b\n", "raw.bin": b"\xff"}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_files_lie_by_step_and_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(opened(tmp_path)) as run:
        run.write_evaluation(5, "all", FILES)
        run.write_evaluation(5, "a/b", {"../x.svg": "<svg/>"})
        run.write_evaluation(10, "..", {"/etc/x": "x"})
        # again, by a run that was continued
        run.write_evaluation(5, "all", {"confusion.svg": "<svg>2</svg>"})
    assert tree(tmp_path / "evaluations") == {
        "step_5/all/confusion.svg": b"<svg>2</svg>",
        "step_5/all/table.csv": b"a,b\n",
        "step_5/all/raw.bin": b"\xff",
        "step_5/a%2Fb/..%2Fx.svg": b"<svg/>",
        "step_10/%../%2Fetc%2Fx": b"x",
    }
    assert capsys.readouterr() == ("", "")
