"""The progress bar, on a terminal and where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from utils.rundir import progress
from utils.rundir.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(
    stream: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str = "none",
    term: str = "xterm",
) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", term)
    bar = ProgressBar(launcher)
    for step in range(1, 301):
        bar.update(step, 300, 0.5, ("exact_accuracy", 0.987), 12345.6)
        if step == 100:
            bar.say("saved")
    bar.close()
    return stream.getvalue()


def test_elsewhere_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(io.StringIO(), monkeypatch)
    last = "100%  step 300/300  loss 0.5  exact accuracy 98.7%  examples/s 12,346"
    assert text.splitlines() == ["saved", last]
    monkeypatch.setattr(progress, "PLAIN_S", 0.0)
    assert len(shown(io.StringIO(), monkeypatch).splitlines()) == 301


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert "saved\n" in text
    assert "300/300" in text
    assert "exact accuracy 98.7%" in text
    assert text.count("\n") <= 3
