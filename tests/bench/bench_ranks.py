"""Measures what several ranks add to a step: CPU time of all of them, and time by the clock, for
one batch on 1, 2 and 4 ranks with one thread each.

    python -m tests.bench.bench_ranks
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.bench.bench_allreduce import Clocks
from tests.ranks import check_ended_well, run_ranks, words
from tests.runs import QUIET
from tests.steps import steps_of, trainer_on
from utils.ranks import distributed

RANKS, ROUNDS, FIRST = (1, 2, 4), 3, 3
RUNS = {  # how many steps are measured of each, and its keys
    "empty": (400, "experiment=tms_target global_batch_size=8 data.held_out=8"),  # almost no work
    "demo": (40, "experiment=demo arch.forward_dtype=float32"),
    "lm": (6, "experiment=lm arch.forward_dtype=float32"),
    "tms_5_2": (200, "experiment=tms_5_2 arch.target=TARGET"),
    "latent_facts": (
        40,
        "experiment=latent_facts arch.readers=[READER] arch.forward_dtype=float32",
    ),
}


def main() -> None:
    if sys.argv[1:]:
        one_rank(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
        return
    print("| run | gradients, MB | CPU ms on 1 rank | 2 ranks | 4 ranks | clock on 2 ranks |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        target = ["experiment=tms_target", *QUIET, f"checkpoint_path={scratch}/target"]
        check_ended_well(run_ranks(1, ["pretrain.py", *target]))
        # a step takes as long whatever the reader has learnt
        reader = [*words("experiment=fact_reader data.tokenizer=bpe:300 max_steps=2"), *QUIET]
        check_ended_well(
            run_ranks(1, ["pretrain.py", *reader, f"checkpoint_path={scratch}/reader"])
        )
        for name, (steps, keys) in RUNS.items():
            keys = keys.replace("TARGET", f"{scratch}/target").replace(
                "READER", f"{scratch}/reader"
            )
            line = [str(steps), f"{scratch}/{name}", *words(keys)]
            rounds = [[measured(ranks, line) for ranks in RANKS] for _ in range(ROUNDS)]
            alone, two, four = zip(*rounds, strict=True)
            cells = [
                f"{alone[0].gradients / 1e6:.3g}",
                f"{1e3 * statistics.median(step.cpu for step in alone):.3g}",
                *(f"{ratio('cpu', many, alone):.2f}×" for many in (two, four)),
                f"{ratio('clock', two, alone):.2f}×",
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


class Step(NamedTuple):
    """The median step of one start."""

    gradients: int  # bytes
    clock: float  # seconds of the slowest rank
    cpu: float  # seconds of all ranks


def ratio(by: str, many: Sequence[Step], alone: Sequence[Step]) -> float:
    pairs = zip(many, alone, strict=True)
    return statistics.median(getattr(step, by) / getattr(one, by) for step, one in pairs)


def measured(ranks: int, line: Sequence[str]) -> Step:
    done = run_ranks(ranks, ["-m", "tests.bench.bench_ranks", *line], timeout=600)
    gradients, times = zip(
        *(json.loads(rank.stdout) for rank in check_ended_well(done)), strict=True
    )
    clocks, cpus = np.array(times).transpose(2, 1, 0)  # by step and rank
    return Step(gradients[0], float(np.median(clocks.max(1))), float(np.median(cpus.sum(1))))


def one_rank(steps: int, folder: Path, *arguments: str) -> None:
    """Prints the bytes of the gradients, and the seconds of each step by both clocks."""
    dist = distributed.start(device="cpu")
    trainer, times = trainer_on(dist, folder, *arguments), []
    trainer.cfg = trainer.cfg.with_values({"log_interval": 1000})
    for step in steps_of(trainer, FIRST + steps):
        start = Clocks(dist)
        step()
        times.append(start.passed())
    print(json.dumps([sum(buffer.nbytes for buffer in trainer.sync.gradients()), times[FIRST:]]))
    distributed.stop()


if __name__ == "__main__":
    main()
