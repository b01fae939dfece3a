"""Ranks that a test starts, disturbs and watches end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.ranks import LAUNCHER_PREFIXES, ROOT, free_port

SCRIPT = str(Path(__file__).with_name("ranks_watch.py"))


def environment(size: int) -> dict[str, str]:
    """Returns the environment of ranks, except for their numbers."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)
    }
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    kept["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as pretrain.py sets it
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Crew:
    """`with Crew(3, "stop", "1") as crew`: three ranks of a script; whatever still runs at the end
    is killed.
    """

    def __init__(self, size: int, *arguments: str, script: str = SCRIPT, **env: str) -> None:
        common = environment(size) | env
        self.folder = tempfile.TemporaryDirectory()
        self.processes = []
        for rank in range(size):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self.file(rank, "out").open("wb") as out, self.file(rank, "err").open("wb") as err:
                command = [sys.executable, script, *arguments]
                process = subprocess.Popen(
                    command,
                    env=common | numbers,
                    cwd=ROOT,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.processes.append(process)

    def file(self, rank: int, stream: str) -> Path:
        return Path(self.folder.name) / f"{rank}.{stream}"

    def out(self, rank: int) -> str:
        return self.file(rank, "out").read_text()

    def err(self, rank: int) -> str:
        return self.file(rank, "err").read_text()

    def errors(self) -> str:
        """Returns the lines that a user's terminal shows, in any order."""
        return "".join(self.err(rank) for rank in range(len(self.processes)))

    def until(self, text: str, ranks: range | None = None, limit: float = 60) -> None:
        """Every rank has printed this."""
        deadline = time.monotonic() + limit
        for rank in ranks or range(len(self.processes)):
            while text not in self.out(rank):
                assert time.monotonic() < deadline, (
                    f"rank {rank} did not print {text!r}: {self.out(rank)}\n{self.errors()}"
                )
                time.sleep(0.01)

    def signal(self, rank: int, signum: int) -> None:
        os.kill(self.processes[rank].pid, signum)

    def end(self, limit: float, but: tuple[int, ...] = ()) -> list[int | None]:
        """Exit statuses, once all (`but` some) have ended."""
        deadline = time.monotonic() + limit
        waited = [process for rank, process in enumerate(self.processes) if rank not in but]
        while any(process.poll() is None for process in waited):
            assert time.monotonic() < deadline, (
                f"still running after {limit} s:"
                f" {[p.poll() for p in self.processes]}\n{self.errors()}"
            )
            time.sleep(0.01)
        return [process.poll() for process in self.processes]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):  # children may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()
