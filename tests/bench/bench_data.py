"""How fast data arrives: examples/s of Sudoku-shaped batches, in process and through a worker, and the builder's time.

OMP_NUM_THREADS=1 python -m tests.bench.bench_data
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from data.build.common import write_dataset
from data.puzzles import PuzzleSource
from data.stream import ShardStream, train_loader
from data.sudoku import generate
from data.sudoku_sets import sudoku_split

BOARDS, AUGMENTATIONS = 1000, 1000
BATCH, SHARDS, STEPS, REPEATS = 768, 8, 2000, 5


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
    return [statistics.median(column) for column in zip(*(measure(work) for _ in range(repeats)), strict=True)]


def build(folder: Path) -> None:
    """What the builder does once it has its boards: augment, fingerprint, write."""
    write_dataset(folder, {"train": sudoku_split("train", 9, *boards(), AUGMENTATIONS, seed=0)}, ["<blank>"])


def boards():
    if not _BOARDS:
        _BOARDS.extend(generate(9, (BOARDS,), 50, seed=0)[0])
    return _BOARDS


_BOARDS: list = []


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    boards()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sudoku"
        clock, own, _ = medians(lambda: build(folder), repeats=3)
        print(f"build {BOARDS:,} boards x {AUGMENTATIONS:,} augmentations: {clock:.2f} s by the clock, {own:.2f} s of CPU (goal 5 s)")
        source = PuzzleSource(
            seed=0, shards=SHARDS, global_batch_size=BATCH, epochs=20000, eval_interval=2000, data_path=str(folder)
        )  # fmt: skip
        stream = ShardStream(source, [range(SHARDS)], 0, STEPS)
        print(f"batches of {BATCH} x {source.spec.seq_len} tokens from {SHARDS} shards, examples/s (goal 1,000,000 on one core)")
        print(f"{'':24}{'by the clock':>14}{'per CPU core':>14}   (median of {REPEATS} runs of {STEPS} steps)")
        for workers in (0, 1, 2):
            clock, own, children = medians(lambda workers=workers: [None for _ in train_loader(stream, workers)])
            busiest = max(own, children / max(1, workers))
            name = f"{workers} worker processes" if workers else "in process"
            print(f"{name:24}{STEPS * BATCH / clock:14,.0f}{STEPS * BATCH / busiest:14,.0f}")


if __name__ == "__main__":
    main()
