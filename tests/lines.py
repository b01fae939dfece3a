"""Command lines by the dozen: one process imports everything once and forks for every line, which then takes tenths of a second.

What is forked is `cli.check()` and `pretrain.main()` with arguments, folder and environment of its own. The parent runs no thread and no
computation: whatever importing left in it (handlers, an idle thread pool) must be as it is in a process that has just begun.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tests.ranks import LAUNCHER_PREFIXES, ROOT, Completed, free_port

LIMIT_S = 60.0  # for one line: none of them trains
PR_SET_PDEATHSIG = 1
SLOW = ("torch", "numpy", "wandb", "sklearn.datasets", "data", "models", "optim")


class Lines:
    """Runs command lines of pretrain.py, each as so many ranks, one after the other."""

    def __init__(self) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith((*LAUNCHER_PREFIXES, "RANK", "WORLD_SIZE", "MASTER_"))}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lines"], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, arguments: Sequence[str], cwd: Path, ranks: int = 1, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
    ) -> list[Completed]:
        """What every rank said, and its exit status: negative where it had to be killed."""
        assert self._process.stdin
        assert self._process.stdout
        request = {"arguments": list(arguments), "cwd": str(cwd), "ranks": ranks, "env": dict(env or {}), "limit_s": limit_s}
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return [Completed(*rank) for rank in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()  # the parent of all ends with its input
        self._process.wait(10)


def serve() -> None:
    """Read a request a line, answer a line each."""
    load()
    gc.freeze()  # what is here now is never garbage: forks need not look through it, nor copy the pages on which they would mark it
    assert threading.active_count() == 1, "a fork takes along the thread that forks, and the locks that others hold"
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(f"{json.dumps(attempt(**request))}\n")
        answers.flush()


def load() -> None:
    """Import what any run imports."""
    import importlib
    import pkgutil

    for name in SLOW:
        module = importlib.import_module(name)
        if name in ("data", "models", "optim"):
            for found in pkgutil.walk_packages(module.__path__, f"{name}."):
                importlib.import_module(found.name)
    import pretrain  # noqa: F401


def attempt(arguments: list[str], cwd: str, ranks: int, env: dict[str, str], limit_s: float) -> list[tuple[int, int, str, str]]:
    """Fork the ranks of one line and wait for them; who is late is killed with all that it has started."""
    if ranks > 1:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), **env}
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(ranks):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else env
            pid = os.fork()
            if not pid:
                become(arguments, cwd, own, f"{folder}/{rank}")
            children[pid] = rank
        status, deadline = {}, time.monotonic() + limit_s
        while children:
            late = time.monotonic() > deadline
            for pid in list(children):
                if late:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ended, code = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    status[children.pop(pid)] = os.waitstatus_to_exitcode(code)
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # what it has left behind
            time.sleep(0.01)
        said = [[Path(f"{folder}/{rank}.{name}").read_text(errors="replace") for name in ("out", "err")] for rank in range(ranks)]
    return [(rank, status[rank], *said[rank]) for rank in range(ranks)]  # type: ignore[misc]


def become(arguments: list[str], cwd: str, env: dict[str, str], files: str) -> NoReturn:
    """In the fork: be a process that somebody has just started."""
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that is killed leaves nobody behind
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(cwd)
        os.environ.update(env)
        sys.argv = [str(ROOT / "pretrain.py"), *arguments]
        import pretrain
        from utils.checkpoint import reader
        from utils.command import cli
        from utils.sweep import entry

        cli.check(sys.argv, reader.config_in, entry.sweep)
        pretrain.main()
    finally:
        os._exit(99)  # it never comes here: main() ends the process itself


if __name__ == "__main__":
    serve()
