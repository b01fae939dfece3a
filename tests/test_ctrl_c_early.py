"""Ctrl-C before anything is loaded, and help that nobody reads to its end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.runs import launched


@pytest.mark.slow
def test_help_that_nobody_reads_to_its_end_is_no_error() -> None:
    line = f"{shlex.quote(sys.executable)} pretrain.py --help | head -1"
    done = launched(["sh", "-c", line])
    assert done.stdout.startswith("usage: python pretrain.py ")
    assert done.stderr == ""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="reads from /proc which signals a process handles",
)
def test_ctrl_c_while_python_loads_is_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "pretrain.py", "experiment=demo"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # Python itself handles SIGINT from its first moment on
        while not handles(process.pid, signal.SIGTERM):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (130, "stopped by SIGINT before training began\n")


def handles(pid: int, signum: int) -> bool:
    caught = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    )
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)
