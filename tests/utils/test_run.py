"""The run directory, what is written into it, and what is shown."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils import git
from utils.distributed import Dist
from utils.errors import ConfigError
from utils.progress import ProgressBar, duration, render
from utils.run import Run

OFF = {"mode": "disabled", "project": "p", "name": "n"}


def opened(
    folder: Path, dist: Dist | None = None, text: str = "seed: 0\n", resumed: int | None = None, evaluation_due: bool = False
) -> Run:
    run = Run(folder, dist or Dist())
    run.begin(text, OFF, resumed, evaluation_due)
    return run


def written(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl, every line of which must be whole and strict JSON."""
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "p" / "x") as run:
        run.log(1, {"train/loss": float("nan"), "up": float("inf"), "n": 3, "train/lr": 0.5})
        run.log(2, {"train/loss": 0.25})
        assert (run.directory / "metrics.jsonl").read_text().count("\n") == 2  # flushed while the run goes on
        run.say("hello – you")
    rows = written(run.directory)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/loss"] is None
    assert rows[0]["up"] is None
    assert (rows[0]["n"], rows[0]["train/lr"], rows[1]["train/loss"]) == (3, 0.5, 0.25)
    assert rows[0]["time"] <= rows[1]["time"]
    assert (run.directory / "config.yaml").read_text() == "seed: 0\n"
    assert (run.directory / "log.txt").read_text(encoding="utf-8").endswith("  hello – you\n")
    assert capsys.readouterr().out == "hello – you\n"
    run.log(3, {})
    run.close()


def test_a_former_run_is_moved_aside_and_never_lost(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        opened(tmp_path / "x", text=text).close()
    kept = {name: (tmp_path / name / "config.yaml").read_text() for name in sorted(os.listdir(tmp_path))}
    assert kept == {"x": "third", "x.old-1": "first", "x.old-2": "second"}
    assert "the former run of this name is now x.old-2" in (tmp_path / "x" / "log.txt").read_text()


def test_a_folder_without_a_run_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x" / ".hydra").mkdir(parents=True)
    opened(tmp_path / "x").close()
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x" / ".hydra").is_dir()


def test_an_impossible_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^checkpoint_path=.*file/x: cannot be made \(Not a directory\)"):
        opened(tmp_path / "file" / "x")


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "x", Dist(1, 2)) as run:
        run.log(1, {"a": 1.0})
        run.say("hello")
        run.progress(2, 2, 0.1, "accuracy", 0.5, 3.0)
        run.mark("finished")
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr() == ("", "")


def test_a_bad_mode_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"^wandb.mode=maybe: choose one of auto, online, offline, disabled$"):
            Run(tmp_path / "x", Dist(rank, 2)).begin("", {"mode": "maybe"})
    assert os.listdir(tmp_path) == []


def test_an_error_goes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError), opened(tmp_path / "x"):
        raise KeyError("mine")


def test_the_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path / "code"), "-c", "user.name=a", "-c", "user.email=b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    (tmp_path / "code").mkdir()
    monkeypatch.setattr(git, "ROOT", tmp_path / "code")
    git.summary.cache_clear()
    assert (git.revision(), git.summary()) == ("", "")
    opened(tmp_path / "bare").close()
    assert not (tmp_path / "bare" / "git.txt").exists()

    run_git("init", "-q", "-b", "trunk")
    (tmp_path / "code" / "a.py").write_text("one\n")
    run_git("add", ".")
    run_git("commit", "-q", "-m", "x")
    commit = run_git("rev-parse", "HEAD").strip()
    assert git.summary() == "", "what runs is what was there when it was first asked"
    git.summary.cache_clear()
    assert git.summary() == f"revision: {commit}\nbranch: trunk\nuncommitted changes: no\n"
    (tmp_path / "code" / "a.py").write_text("two\n")
    git.summary.cache_clear()
    (tmp_path / "code" / "new.py").write_text("")
    opened(tmp_path / "x").close()
    assert (tmp_path / "x" / "git.txt").read_text().endswith("uncommitted changes: yes\n")
    diff = (tmp_path / "x" / "uncommitted.diff").read_text()
    assert diff.startswith("# untracked: new.py\n")
    assert "-one\n+two\n" in diff
    run_git("checkout", "-q", "a.py")
    run_git("apply", str(tmp_path / "x" / "uncommitted.diff"))
    assert (tmp_path / "code" / "a.py").read_text() == "two\n"
    monkeypatch.setenv("PATH", "")
    git.summary.cache_clear()
    assert git.summary() == ""
    git.summary.cache_clear()


ODD = "name \u2028 odd"


def logged(folder: Path, steps: range, text: str, resumed: int | None = None) -> None:
    with opened(folder, text=text, resumed=resumed) as run:
        for step in steps:
            run.log(step, {"loss": 1 / step, ODD: float("nan")})


def test_a_continued_run_reads_like_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.run.time.time", lambda: 1.0)  # the one thing that may differ
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    logged(undisturbed, range(1, 9), "lr: 2")
    logged(disturbed, range(1, 7), "lr: 1")  # the rows after the checkpoint of step 4 are lost with the crash
    (disturbed / "checkpoints" / "step_4").mkdir(parents=True)
    for name in ("metrics.jsonl", "log.txt"):
        with open(disturbed / name, "a") as file:
            file.write('{"step": 1, "los')  # and one more was being written
    opened(disturbed, text="lr: 2", resumed=4).close()
    assert [row["step"] for row in written(disturbed)] == [1, 2, 3, 4]
    logged(disturbed, range(5, 9), "lr: 2", resumed=4)
    assert (disturbed / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    assert (disturbed / "config.yaml").read_text() == "lr: 2"
    assert (disturbed / "log.txt").read_text().splitlines()[-2].endswith("  continued at step 4")
    assert "los\n" in (disturbed / "log.txt").read_text()  # nothing is glued to it
    assert (disturbed / "checkpoints" / "step_4").is_dir()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert not list(disturbed.glob(".*"))


def test_rows_that_are_no_rows_are_dropped(tmp_path: Path) -> None:
    lines = [b'{"step": 1}', b"\xff\xfe", b"[3]", b"", b'{"loss": 1}', b'{"step": "2"}', b'{"step": 9}', b'{"step": 2}', b'{"step": 2}']
    opened(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    opened(tmp_path, resumed=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    opened(tmp_path, resumed=0).close()
    assert written(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"^checkpoint_path=.*: cannot be written \(Is a directory\); give a folder"):
        opened(tmp_path, resumed=2)


def test_the_code_a_run_began_with_stays_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"summary": "revision: a\nuncommitted changes: no\n", "uncommitted": ""}
    monkeypatch.setattr(git, "summary", lambda: texts["summary"])
    monkeypatch.setattr(git, "uncommitted", lambda: texts["uncommitted"])
    opened(tmp_path).close()
    texts["uncommitted"] = "# untracked: notes.txt\n"  # no other code
    opened(tmp_path, resumed=1).close()
    assert {path.name for path in tmp_path.glob("*git*")} == {"git.txt"}
    for number, (revision, change) in enumerate([("b", ""), ("b", "-one\n+two\n"), ("c", "")], start=1):
        texts.update(summary=f"revision: {revision}\nuncommitted changes: no\n", uncommitted=change)
        opened(tmp_path, resumed=1).close()
        assert (tmp_path / "log.txt").read_text().count("the code has changed") == number
    revisions = [(tmp_path / name).read_text()[10] for name in ("git.old-1.txt", "git.old-2.txt", "git.old-3.txt", "git.txt")]
    assert revisions == ["a", "b", "b", "c"]
    changes = [(tmp_path / f"uncommitted{old}.diff").read_text() for old in (".old-1", ".old-2", ".old-3", "")]
    assert changes == ["# untracked: notes.txt\n", "", "-one\n+two\n", ""]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_a_plain_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(stream, clock=clock)
    for step in range(1, 301):
        clock.now += 0.1
        bar.update(step, 300, None, ("exact_accuracy", None), None)
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3  # about 10 s, about 20 s, and the last
    assert lines[-1] == "100%  step 300/300  loss –  exact accuracy –  – examples/s  0:00 left"
    assert lines[0].endswith("0:20 left")
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock=clock)
    for step in range(1, 101):
        clock.now += 0.02
        bar.update(step, 100, 0.5, ("exact_accuracy", 0.987), 12345.6)
        if step == 50:
            bar.say("saved")
    bar.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert 18 <= text.count("\r") <= 24  # 2 s at ten a second
    before, after = text.split("saved\n")
    assert before.endswith("\r\x1b[K")  # the bar is wiped before the line ...
    assert after.startswith(before.split("\x1b[K")[-2])  # ... and is there again below it
    assert text.rstrip("\n").endswith("━━━  100/100  loss 0.5  exact accuracy 98.7%  12,346 ex/s  0:00 left")
    assert all(len(line) < 100 for line in text.replace("\n", "\r").replace("\x1b[K", "").split("\r"))


def test_the_bar_fits_its_terminal() -> None:
    usual = (123, 1500, 0.01234, ("exact_accuracy", 0.973), 5432.1, 48.0)
    for columns in (79, 90, 100, 120):
        line = render(*usual, columns=columns)
        assert len(line) <= columns
        assert line.endswith("─   123/1500  loss 0.0123  exact accuracy 97.3%  5,432 ex/s  0:48 left")
    assert render(*usual, columns=120).startswith("━" + "─" * 19 + "  ")
    long = (1234, 99999, 1.2345e-5, ("exact_accuracy", 0.5), 98765.4, 3725.0)
    assert len(render(*long, columns=79)) <= 84
    assert "━" not in render(*long, columns=79)
    assert "perplexity 12.34" in render(1, 2, 0.1, ("perplexity", 12.341), 1.0, None)
    assert [duration(seconds) for seconds in (0, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]


def test_mpirun_terminals_get_plain_lines() -> None:
    stream = Terminal()
    ProgressBar(stream, launcher="openmpi").update(1, 1, 0.5, ("accuracy", 0.5), 1.0)
    assert "\r" not in stream.getvalue()


def test_a_closed_pipe_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    bar = ProgressBar(Closed())
    bar.say("a")
    bar.update(1, 1, 0.5, ("accuracy", 0.5), 1.0)
    bar.close()


def test_an_ascii_terminal_is_no_error() -> None:
    raw = io.BytesIO()
    bar = ProgressBar(io.TextIOWrapper(raw, encoding="ascii"))
    bar.update(1, 1, None, ("accuracy", None), None)
    assert b"loss ?" in raw.getvalue()


def test_importing_run_loads_nothing_heavy() -> None:
    code = "import sys, utils.run; print([name for name in ('wandb', 'datasets', 'safetensors', 'omegaconf') if name in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_evaluation_that_is_still_due_is_not_there_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        for row in ({"train/loss": 1.0}, {"eval/accuracy": 0.5}):
            run.log(1, row)
            run.log(2, row)
    opened(tmp_path, resumed=2).close()
    assert len(written(tmp_path)) == 4
    opened(tmp_path, resumed=2, evaluation_due=True).close()
    assert [(row["step"], "eval/accuracy" in row) for row in written(tmp_path)] == [(1, False), (2, False), (1, True)]
