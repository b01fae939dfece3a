"""The runs of a proof: each rank of each is a process of this machine.

Most of a run of a few steps is the import of PyTorch. One process imports it, and most runs are
forks of that one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from utils.errors import visible
from utils.files import ROOT
from utils.sweep.children import NOT_FOR_CHILDREN

PROGRAM = str(ROOT / "pretrain.py")
FIRST = ["compile=false", "eval_examples=32"]  # a key that is given may say otherwise
LAST = [
    "exact=true", "num_workers=0", "log_interval=1", "keep=null", "checkpoint_minutes=null",
    "report=false", "log=[]",
]  # fmt: skip
STARTED = multiprocessing.get_context("spawn")
# elsewhere what importing PyTorch leaves in a process may not be forked
FORKED = multiprocessing.get_context("forkserver") if sys.platform == "linux" else STARTED
FORKED.set_forkserver_preload(["pretrain", "torch._dynamo"])  # which every optimizer imports


@dataclass(frozen=True)
class Way:
    """A way to train that must not matter."""

    name: str
    about: str
    keys: Sequence[str] = ()
    ranks: int = 1
    forked: bool = True  # or else started, each rank with another order of sets


@dataclass(frozen=True)
class Run:
    """The processes of a run, one for each rank, and the file to which they write errors."""

    way: Way
    folder: Path
    processes: Sequence[BaseProcess]
    errors: Path

    def wait(self) -> int:
        """Returns the first exit status that is not 0, of all ranks."""
        for process in self.processes:
            process.join()
        return next((process.exitcode for process in self.processes if process.exitcode), 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def error(self) -> str:
        said = self.errors.read_text(errors="replace").splitlines() or ["it said nothing"]
        lines = [line for line in said if line.startswith("error")]
        return visible((lines or said)[-1])


def start(arguments: Sequence[str], keys: Sequence[str], way: Way, folder: Path) -> Run:
    """Starts to train in one way."""
    at = next((i for i, each in enumerate(arguments) if "=" in each and each[0] != "-"), 0)
    path = folder / way.name.replace(" ", "-")
    line = [*arguments[:at], *FIRST, *arguments[at:], *LAST, *keys, *way.keys]
    line.append(f"checkpoint_path={path}")
    errors = path.with_suffix(".txt")
    errors.touch()
    processes: list[BaseProcess] = []
    for rank, place in enumerate([{}] if way.ranks == 1 else _places(way.ranks)):
        # an interpreter reads it as it starts, so forks have that of the process they come from
        seed = 2 if way.forked else 1 + rank
        os.environ.update(PYTHONHASHSEED=str(seed), OMP_NUM_THREADS="1")
        context = FORKED if way.forked else STARTED
        process = context.Process(target=_train, args=(line, place, errors))
        process.start()
        processes.append(process)
    return Run(way, path, processes, errors)


def _places(ranks: int) -> list[dict[str, str]]:
    """Returns the variables that tell processes of this machine that they are ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _train(line: Sequence[str], place: Mapping[str, str], errors: Path) -> None:
    """Becomes `python pretrain.py LINE`, as the rank of a place."""
    for name in NOT_FOR_CHILDREN:
        os.environ.pop(name, None)
    os.environ.update(place)
    with errors.open("ab") as said, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
    sys.argv = [PROGRAM, *line]
    runpy.run_path(PROGRAM, run_name="__main__")
