"""Launchers of sweeps pickle the task function by value, and with it all of the script that it
reaches.
"""

from __future__ import annotations

import subprocess
import sys
from types import FunctionType, GeneratorType

import pytest

import pretrain
from tests.ranks import ROOT


def test_no_function_of_the_script_holds_a_generator() -> None:
    functions = [
        value
        for value in (vars(pretrain) | vars(pretrain.Trainer)).values()
        if isinstance(value, FunctionType) and value.__module__ == "pretrain"
    ]
    assert {"train", "evaluate"} <= {function.__name__ for function in functions}
    for function in functions:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        held += [inner for value in held for inner in getattr(value, "__dict__", {}).values()]
        assert not any(isinstance(value, GeneratorType) for value in held), function.__name__


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
