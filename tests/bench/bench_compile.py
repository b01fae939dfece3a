"""Measures what torch.compile gains on a CPU in bfloat16, and after how many steps it pays: eager
and compiled steps of one net in turns, in CPU time of one thread.

python -m tests.bench.bench_compile
python -m tests.bench.bench_compile --only lm
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NETS = {
    "demo": ["experiment=demo"],
    "lm": ["experiment=lm"],
    "shakespeare": ["experiment=shakespeare"],
    "digits": ["experiment=digits", "arch.forward_dtype=bfloat16"],
    "hrm": ["arch=hrm", "global_batch_size=8"],
}
STEPS = 12


def cpu_s() -> float:
    """CPU seconds of this process and of the compilers that it has started and that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, kinds))


def child(arguments: list[str], steps: int) -> None:
    """Prints seconds per step as JSON: eager ones, compiled ones, the first compiled one."""
    import torch

    from tests.steps import steps_of, trainer_on
    from utils.measure import hardware
    from utils.ranks.distributed import Dist

    torch.set_num_threads(1)
    hardware.tune()
    ways = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("false", "true"):
            run = [
                *arguments,
                f"compile={name}",
                "max_steps=1000000",
                "arch.forward_dtype=bfloat16",
            ]
            ways[name] = steps_of(trainer_on(Dist(), Path(scratch) / name, *run), 10**6)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(steps):
            for name, way in ways.items():
                step, start = next(way), cpu_s()
                step()
                taken[name].append(cpu_s() - start)
    print(json.dumps(taken))


def measured(arguments: list[str], steps: int, cache: str) -> tuple[float, float, float]:
    """Returns eager and compiled seconds per step, and what the first compiled one took longer."""
    command = [sys.executable, "-m", "tests.bench.bench_compile", "--child", json.dumps(arguments)]
    # one compiler at a time, in the process whose time is measured
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", str(steps)], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    taken = json.loads(done.stdout.splitlines()[-1])
    # the first steps allocate
    eager, compiled = (statistics.median(taken[name][2:]) for name in ("false", "true"))
    return eager, compiled, taken["true"][0] - taken["false"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=NETS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child), options.steps)
        return
    print("One thread, bfloat16, CPU seconds; steps are medians in turns")
    print("| net | eager ms | compiled ms | gain | compile s | from cache s | pays after steps |")
    print("|---|---|---|---|---|---|---|")
    for name, arguments in NETS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as cache:
            cold = measured(arguments, 3, cache)[2]
            eager, compiled, warm = measured(arguments, options.steps, cache)
        pays = f"{cold / (eager - compiled):,.0f}" if compiled < eager else "never"
        print(
            f"| {name} | {eager * 1e3:.1f} | {compiled * 1e3:.1f} | {eager / compiled:.2f} |"
            f" {cold:.1f} | {warm:.1f} | {pays} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
