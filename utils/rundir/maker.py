"""Draws the page of a run in a separate process, so that no step waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from utils.errors import brief
from utils.files import ROOT

REPORT_FILE = "report.html"
GAP_S = 5.0  # evaluations that follow each other faster share a page
PATIENCE_S = 5.0  # to wait at the end of a run; a slower page is still finished later


class Maker:
    """Draws a run's page when asked, one at a time."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        """`note` writes a line to log.txt, if a page cannot be made."""
        self._directory, self._note = directory.absolute(), note
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._finished = -GAP_S, False

    def draw(self) -> None:
        """Starts drawing, unless a page is being drawn or has just been."""
        if self._wait(0.0) and time.monotonic() - self._started >= GAP_S:
            self._start()

    def finish(self, patience_s: float) -> None:
        """Draws the last page, once. Waits up to `patience_s` for it, then leaves it to itself."""
        if self._finished:
            return
        self._finished = True
        deadline = time.monotonic() + patience_s
        self._wait(patience_s)  # it may have read the files too early
        self._start()
        self._wait(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        null = subprocess.DEVNULL
        self._started = time.monotonic()
        try:
            # a separate pipe for stderr: readers of the run's output would otherwise wait until the
            # page is drawn
            self._process = subprocess.Popen(
                [sys.executable, "-m", "utils.report", "--beside", str(self._directory)],
                stdin=null,
                stdout=null,
                stderr=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            self._note(f"{REPORT_FILE} cannot be made ({brief(error)})")

    def _wait(self, seconds: float) -> bool:
        """Waits for the page that is being drawn, and notes why it failed. False if it takes
        longer.
        """
        if self._process is None:
            return True
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            lines = stream.read().decode(errors="replace").splitlines()
        self._process = None
        if status:
            reason = lines[-1] if lines else f"exit status {status}"
            self._note(f"{REPORT_FILE} cannot be made ({brief(reason)})")
        return True
