"""How fast data arrives: examples/s of Sudoku-shaped and digit batches, in process and through
workers, and the builder's time.

OMP_NUM_THREADS=1 python -m tests.bench.bench_data
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from data.build.common import write_dataset
from data.recursive.sudoku import generate, sudoku_split
from data.source import Source
from data.stream import ShardStream, train_loader
from tests.making import make_source

BOARDS, AUGMENTATIONS = 1000, 1000
SHARDS, STEPS, REPEATS = 8, 1000, 5


def cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measure(work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of one run: by the clock, of this process's CPU, of its finished workers' CPU."""
    began = time.perf_counter(), cpu(resource.RUSAGE_SELF), cpu(resource.RUSAGE_CHILDREN)
    work()
    ended = time.perf_counter(), cpu(resource.RUSAGE_SELF), cpu(resource.RUSAGE_CHILDREN)
    clock, own, children = (end - begin for begin, end in zip(began, ended, strict=True))
    return clock, own, children


def medians(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Medians of several runs; the first, which fills caches, does not count."""
    work()
    return [
        statistics.median(column)
        for column in zip(*(measure(work) for _ in range(repeats)), strict=True)
    ]


def build(folder: Path) -> None:
    """Does what a builder does once it has its boards: augment, fingerprint, write."""
    puzzles, answers = boards()
    split = sudoku_split("train", 9, puzzles, answers, AUGMENTATIONS, seed=0)
    write_dataset(folder, {"train": split}, ["<blank>"])


@cache
def boards() -> tuple[np.ndarray, np.ndarray]:
    """Puzzles and their answers."""
    (made,) = generate(9, (BOARDS,), 50, seed=0)
    return made


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    boards()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sudoku"
        clock, own, _ = medians(lambda: build(folder), repeats=3)
        print(
            f"build {BOARDS:,} boards x {AUGMENTATIONS:,} augmentations: {clock:.2f} s by the"
            f" clock, {own:.2f} s of CPU (goal 5 s)"
        )
        common = {"seed": 0, "shards": SHARDS, "epochs": 20000}
        print(
            f"batches from {SHARDS} shards; a step costs the main process its CPU time, the rest is"
            f" prefetched (medians of {REPEATS})"
        )
        print(f"{'':48}{'examples/s':>12}{'ms/step':>10}{'main CPU ms':>13}{'worker CPU ms':>15}")
        for batch in (768, 32):
            rows(
                f"puzzles, {batch} x 81",
                make_source("puzzles", **common, global_batch_size=batch, data_path=str(folder)),
                batch,
            )
        rows("digits, 64 x 28 x 28", make_source("digits", **common, global_batch_size=64), 64)


def rows(name: str, source: Source, batch: int) -> None:
    """One line of the table for each number of workers."""
    stream = ShardStream(source, [range(SHARDS)], 0, STEPS)
    for workers in (0, 1, 2):
        costs = medians(lambda workers=workers: [None for _ in train_loader(stream, workers)])
        clock, own, children = (1e3 * seconds / STEPS for seconds in costs)
        where = f"{workers} worker processes" if workers else "in process"
        speeds = f"{1e3 * batch / clock:12,.0f}{clock:10.3f}{own:13.3f}{children:15.3f}"
        print(f"{name:24}{where:24}{speeds}", flush=True)


if __name__ == "__main__":
    main()
