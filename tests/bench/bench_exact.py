"""Measures the cost of `exact=true`: the demo's step on one rank and one thread, side by side with
the fast path, as CPU time.

A rank's pass over its whole part of the batch becomes one pass for each of its shards.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.steps import steps_of, trainer_on
from utils.ranks.distributed import Dist

ROUNDS, FIRST = 25, 3
WAYS = {"fast": ["exact=false"]} | {
    f"{shards} shards": ["exact=true", f"shards={shards}"] for shards in (8, 4, 2)
}


def main() -> None:
    torch.set_num_threads(1)
    shown = " | ".join(f"exact, {way}" if way != "fast" else "fast, CPU ms" for way in WAYS)
    print(f"| computed in | {shown} |\n|{'---|' * (len(WAYS) + 1)}")
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as scratch:
            steps = [
                steps_of(
                    trainer_on(
                        Dist(),
                        Path(scratch, str(number)),
                        *("experiment=demo", f"arch.forward_dtype={dtype}", *keys),
                    ),
                    FIRST + ROUNDS,
                )
                for number, keys in enumerate(WAYS.values())
            ]
            turns = [[seconds(next(step)) for step in steps] for _ in range(FIRST + ROUNDS)]
        fast, *exact = zip(*turns[FIRST:], strict=True)
        times = [statistics.median(map(float.__truediv__, slow, fast)) for slow in exact]
        cells = [f"{1e3 * statistics.median(fast):.0f}", *(f"{each:.2f}×" for each in times)]
        print(f"| {dtype} | {' | '.join(cells)} |", flush=True)


def seconds(step: Callable[[], None]) -> float:
    before = time.process_time()
    step()
    return time.process_time() - before


if __name__ == "__main__":
    main()
