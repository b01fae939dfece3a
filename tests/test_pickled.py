"""Launchers of sweeps pickle the task function by value, and with it what the script defines."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import FunctionType, GeneratorType

import cloudpickle

import pretrain
from tests.ranks import ROOT


def test_no_function_of_the_script_holds_a_generator() -> None:
    functions = [value for value in vars(pretrain).values() if isinstance(value, FunctionType) and value.__module__ == "pretrain"]
    assert len(functions) > 8
    for function in functions:
        held = [cell.cell_contents for wrapped in unwrapped(function) for cell in wrapped.__closure__ or ()]
        for value in held:
            assert not isinstance(value, GeneratorType), function.__name__
            assert not any(isinstance(inner, GeneratorType) for inner in vars(value).values()) if hasattr(value, "__dict__") else True


def unwrapped(function: FunctionType) -> list[FunctionType]:
    inner = inspect.unwrap(function)
    return [function] if inner is function else [function, inner]


def test_the_task_function_can_be_sent_to_another_process() -> None:
    """As a launcher does it: the script is `__main__` where it is pickled, and is not there where it is unpickled."""
    pickle = "import sys, runpy, cloudpickle; script = runpy.run_path('pretrain.py', run_name='__mp_main__')\n"
    pickle += "sys.stdout.buffer.write(cloudpickle.dumps(script['app'].__wrapped__))"
    sent = subprocess.run(
        [sys.executable, "-c", pickle.replace("__mp_main__", "__not_there__")], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    back = cloudpickle.loads(sent)
    assert back.__name__ == "app"
    assert {"cli", "pretrain"} <= set(back.__globals__)
