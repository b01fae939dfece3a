"""Processes that take steps in turns, so that whatever else the machine does meets all of them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable


class Process:
    """A process that calls `serve`, with one thread."""

    def __init__(self, command: list[str], **env: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )
        assert self._child.stdin
        assert self._child.stdout
        self._asks, self._answers = self._child.stdin, self._child.stdout
        while (line := self._answers.readline()) != "ready\n":
            assert line, f"{command} has ended"

    def seconds(self, steps: int = 1) -> float:
        """Returns how long one of so many steps took."""
        print(steps, file=self._asks, flush=True)
        return float(self._answers.readline())

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


def serve(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
    """Answers each number on standard input with how long one of so many steps took."""
    print("ready", flush=True)
    for line in sys.stdin:
        began = clock()
        for _ in range(int(line)):
            step()
        print((clock() - began) / int(line), flush=True)
