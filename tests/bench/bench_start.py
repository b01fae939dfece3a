"""Measures how long commands take to answer, and runs to begin: by the clock and in CPU time.

python -m tests.bench.bench_start
python -m tests.bench.bench_start --before FOLDER    # in turns with another checkout
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.ranks import ROOT

# the last line of a run before its first step
BEGINS = "PyTorch "
RUN = ["pretrain.py", "wandb.mode=disabled", "report=false", "max_steps=1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
CHECKPOINT = ["-m", "utils.checkpoint"]
CASES = {
    "`--help`": ["pretrain.py", "--help"],
    "an unknown key": ["pretrain.py", "lrr=1"],
    "a wrong value": ["pretrain.py", "experiment=demo", "lr=fast"],
    "`import torch`": ["-c", "import os, torch; os._exit(0)"],
    "`experiment=demo`, to its first step": [*RUN, "experiment=demo"],
    "`experiment=digits`, to its first step": [*RUN, "experiment=digits"],
    "`experiment=demo` on two ranks of torchrun": [*TORCHRUN, *RUN, "experiment=demo"],
    "`python -m utils.checkpoint show`": [*CHECKPOINT, "show", "RUN"],
    "`python -m utils.report`": ["-m", "utils.report", "RUN"],
}


def measured(root: Path, arguments: list[str], scratch: Path) -> tuple[float, float]:
    """Returns the seconds until a command ends, or a run begins, and the CPU time of all its
    processes.
    """
    words = [word.replace("RUN", str(scratch / "made")) for word in arguments]
    runs = "pretrain.py" in words and "max_steps=1" in words
    words += ["resume=false", f"checkpoint_path={scratch / 'run'}"] if runs else []
    start, before = time.perf_counter(), ended_s()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if runs and BEGINS in line:
            taken, running = time.perf_counter() - start, below(process.pid)
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
            return taken, sum(running.values())
    process.wait()
    assert not runs, f"{words} has not begun"
    return time.perf_counter() - start, ended_s() - before


def ended_s() -> float:
    return sum(os.times()[2:4])  # of children that have ended


def below(pid: int) -> dict[int, float]:
    """The CPU seconds so far of a process and all that it has started, in any session."""
    processes = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            ticks = sum(map(int, fields[11:15]))
            processes[int(file.parent.name)] = int(fields[1]), ticks / os.sysconf("SC_CLK_TCK")
    family, size = {pid}, 0
    while size < len(family):
        size = len(family)
        family |= {child for child, (parent, _) in processes.items() if parent in family}
    return {member: processes[member][1] for member in family if member in processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout")
    options = parser.parse_args()
    roots = [root for root in (options.before, ROOT) if root]
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"Medians of {options.repeats}" + (", before and after in turns" * (len(roots) > 1)))
    heads = [f"{unit}{which}" for which in ("", " before")[: len(roots)] for unit in ("s", "CPU s")]
    print(f"| what | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tiny = ["experiment=digits", f"checkpoint_path={scratch / 'made'}"]
        command = [sys.executable, *RUN, *tiny]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        for name, arguments in CASES.items():
            rounds = [
                [measured(root, arguments, scratch) for root in reversed(roots)]
                for _ in range(options.repeats)
            ]
            cells = [
                f"{statistics.median(figures):.2f}"
                for way in zip(*rounds, strict=True)
                for figures in zip(*way, strict=True)
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
