"""Launchers of sweeps pickle the task function by value, and with it all of the script that it
reaches.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import ROOT


@pytest.mark.slow
def test_the_task_function_can_be_sent_to_another_process() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    # under a name that nobody can import, as `__main__` is one that stands for something else
    # elsewhere
    code = (
        "import runpy, sys, cloudpickle; script = runpy.run_path('pretrain.py', run_name='sent')\n"
    )
    code += "sys.stdout.buffer.write(cloudpickle.dumps(script['app'].__wrapped__))"
    sent = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    assert {"cli", "pretrain"} <= set(cloudpickle.loads(sent).__globals__)
