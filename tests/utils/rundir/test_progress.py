"""The progress bar, on terminals of all kinds and where there is none."""

from __future__ import annotations

import io
import os

import pytest

from utils.ranks import signals
from utils.rundir.progress import ProgressBar, duration, render
from utils.terminal import redrawable


@pytest.fixture(autouse=True)
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


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
    assert text.rstrip("\n").endswith(
        "━━━  100/100  loss 0.5  exact accuracy 98.7%  12,346 ex/s  0:00 left"
    )
    assert all(
        len(line) < 100 for line in text.replace("\n", "\r").replace("\x1b[K", "").split("\r")
    )


def test_the_bar_fits_its_terminal() -> None:
    usual = (123, 1500, 0.01234, ("exact_accuracy", 0.973), 5432.1, 48.0)
    for columns in (79, 90, 100, 120):
        line = render(*usual, columns=columns)
        assert len(line) <= columns
        assert line.endswith(
            "─   123/1500  loss 0.0123  exact accuracy 97.3%  5,432 ex/s  0:48 left"
        )
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


USUAL = (123, 1500, 0.01234, ("exact_accuracy", 0.973), 5432.1, 48.0)


def test_the_line_fits_any_width() -> None:
    lines = [render(*USUAL, columns=columns) for columns in range(1, 130)]
    assert all(1 <= len(line) <= columns for columns, line in enumerate(lines, start=1))
    assert all(
        len(render(10**9, 10**9, 1e-30, ("x" * 200, 1e-30), 1e12, 1e9, columns=columns)) <= columns
        for columns in range(1, 400)
    )
    assert [lines[columns - 1].strip() for columns in (1, 2, 19, 31, 45)] == [
        "…",
        "8%",
        "8%   123/1500",
        "8%   123/1500  0:48 left",
        "8%   123/1500  loss 0.0123  0:48 left",
    ]


@pytest.mark.parametrize("columns", ["1", "5", "20"])
def test_what_is_drawn_is_never_wrapped(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock=clock)
    clock.now += 1
    bar.update(*USUAL[:5])
    drawn = stream.getvalue().removeprefix("\r\x1b[K")
    assert 1 <= len(drawn) <= max(1, int(columns) - 1)


@pytest.mark.parametrize("term", ["dumb", "", None])
def test_a_terminal_that_knows_no_codes_gets_none(
    term: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TERM")
    if term is not None:
        monkeypatch.setenv("TERM", term)
    stream = Terminal()
    bar = ProgressBar(stream)
    bar.update(1, 2, 0.5, ("accuracy", 0.5), 1.0)
    bar.update(2, 2, 0.5, ("accuracy", 0.5), 1.0)
    bar.close()
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    signals.say("stop")
    assert errors.getvalue() == "stop\n"
    monkeypatch.setenv("TERM", "xterm")
    signals.say("stop")
    assert errors.getvalue() == "stop\n\r\x1b[Kstop\n"


def test_streams_that_are_closed_are_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, terminal = open(os.devnull, "w"), Terminal()  # noqa: SIM115
    closed.close()
    terminal.close()
    assert not redrawable(None)
    assert not redrawable(closed)
    for stream in (None, closed, terminal):
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        bar = ProgressBar()
        bar.say("a")
        bar.update(1, 1, 0.5, ("accuracy", 0.5), 1.0)
        bar.close()
        signals.say("stop")
    assert capsys.readouterr() == ("", "")
