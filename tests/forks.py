"""Ranks by the dozen: one process imports everything once and forks for every rank, which is so
spared 3 of 5 seconds.

What is forked becomes `python pretrain.py …` or `python -m …`, with its own arguments, folder and
environment. The parent runs no thread and no computation: whatever importing left in it (handlers,
an idle thread pool) must be as it is in a process that has just begun.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from hydra.core.plugins import Plugins

from tests.ranks import ROOT, Completed, attend

PR_SET_PDEATHSIG = 1
SLOW = ("torch", "torch._inductor", "numpy", "wandb", "data", "models", "optim")


class Forks:
    """The parent, which is started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, args: Sequence[str], envs: Sequence[Mapping[str, str]], cwd: Path, timeout: float
    ) -> list[Completed]:
        """A rank for each environment; what each said, and its exit status: negative where it had
        to be killed.
        """
        if self._process is None:
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "TORCH_CPP_LOG_LEVEL": "FATAL",  # as pretrain.py sets it
            }
            command = [sys.executable, "-m", "tests.forks"]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin
        assert self._process.stdout
        request = {
            "args": list(args),
            "envs": [dict(env) for env in envs],
            "cwd": str(cwd),
            "timeout": timeout,
        }
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        try:
            answer = self._process.stdout.readline()
        except BaseException:  # the test's time is over: its answer is not that of the next test
            self._process.kill()
            self._process = None
            raise
        return [Completed(*rank) for rank in json.loads(answer)]

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()  # the parent of all ends with its input
            self._process.wait(10)


class Fork:
    """A child as `subprocess.Popen` would know it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        return self._ended(0)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def serve() -> None:
    """Read a request a line, answer a line each."""
    die_with_parent()
    load()
    # what is here now is never garbage: forks need not look through it, nor copy the pages on which
    # they would mark it
    gc.freeze()
    assert threading.active_count() == 1, (
        "a fork takes along the thread that forks, and the locks that others hold"
    )
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        starts = [partial(fork, request["args"], request["cwd"], env) for env in request["envs"]]
        done = attend(starts, request["timeout"])
        ends = [(each.rank, each.returncode, each.stdout, each.stderr) for each in done]
        answers.write(f"{json.dumps(ends)}\n")
        answers.flush()


def load() -> None:
    """Import what any run imports."""
    import importlib
    import pkgutil

    for name in SLOW:
        module = importlib.import_module(name)
        if name in ("data", "models", "optim"):
            for module_info in pkgutil.walk_packages(module.__path__, f"{name}."):
                importlib.import_module(module_info.name)
    import pretrain  # noqa: F401

    Plugins.instance()  # Hydra's own and those of others


def fork(args: list[str], cwd: str, env: dict[str, str], out: IO[bytes], err: IO[bytes]) -> Fork:
    pid = os.fork()
    return Fork(pid) if pid else become(args, cwd, env, out, err)


def become(
    args: list[str], cwd: str, env: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> NoReturn:
    """In the fork: becomes like a process that has just started."""
    status = 1
    try:
        os.setsid()
        die_with_parent()
        for stream, number in ((out, 1), (err, 2)):
            os.dup2(stream.fileno(), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            runpy.run_path(args[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        finish(status)


def finish(status: int) -> NoReturn:
    """As the interpreter does at its end."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(status)


def die_with_parent() -> None:
    """A test that is killed leaves no processes behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve()
