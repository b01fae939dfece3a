"""The progress bar on a terminal; tests/test_same_run.py has its plain line."""

from __future__ import annotations

import io
import sys

import pytest

from utils.rundir.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bar = ProgressBar()
    for step in range(1, 301):
        bar.update(step, 300, 0.5, ("exact_accuracy", 0.987), 12345.6)
    bar.say("saved")
    bar.close()
    text = stream.getvalue()
    assert "saved\n" in text
    assert "300/300" in text
    assert text.count("\n") <= 3
