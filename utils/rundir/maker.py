"""Draws the page of a run in a process of its own, so that no step waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from utils.errors import brief
from utils.files import ROOT

FILE = "report.html"
GAP_S = 5.0  # evaluations that follow each other faster share a page
PATIENCE_S = 5.0  # to wait at the end of a run; a slower page is still finished later


class Maker:
    """Draws a run's page when asked, one at a time."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        """`note` writes a line to log.txt, if a page cannot be made."""
        self._directory, self._note = directory.absolute(), note
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -GAP_S

    @property
    def path(self) -> Path:
        return self._directory / FILE

    def draw(self) -> None:
        """Starts drawing, unless a page is being drawn or has just been."""
        if not self._is_busy() and time.monotonic() - self._started >= GAP_S:
            self._start()

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Draws the last page. Waits up to `patience_s` for it, then leaves it to itself."""
        deadline = time.monotonic() + patience_s
        self._wait(deadline)  # it may have read the files too early
        self._start()
        self._wait(deadline)

    def _start(self) -> None:
        null = subprocess.DEVNULL
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "utils.report", "--beside", str(self._directory)],
                stdin=null,
                stdout=null,
                stderr=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            self._note(f"{FILE} cannot be made ({brief(error)})")

    def _is_busy(self) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        self._note_failure(self._process, status)
        self._process = None
        return False

    def _note_failure(self, process: subprocess.Popen[bytes], status: int) -> None:
        """Logs why a process that has ended failed, if it did, in one line."""
        assert process.stderr is not None
        with process.stderr as stream:
            lines = stream.read(1 << 16).decode(errors="replace").splitlines() if status else []
        if status:
            reason = lines[-1] if lines else f"exit status {status}"
            self._note(f"{FILE} cannot be made ({brief(reason)})")

    def _wait(self, deadline: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
        self._is_busy()
