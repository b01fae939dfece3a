"""A puzzle table whole on every rank, and shared out over ranks: time of a step, and memory that a
rank holds.

    python -m tests.bench.bench_table

The table is that of ARC-AGI-1 with 1,000 augmentations: 961,000 rows, 512 wide, and its average.
The net is small, and puzzles are short, so that the table's part shows. Steps of both kinds at 2
gloo ranks take turns inside one process group. Memory is what a process of its own has gained when
a few steps and an evaluation's exchange of weights and averages are done.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.data.recursive.helpers import ragged_groups, write_dataset
from tests.ranks import check_ended_well, run_ranks
from tests.steps import steps_of, trainer_on
from utils.ranks import distributed

KINDS = {"whole": "false", "shared out": "true"}
ROWS, ROUNDS = 961_000, 30
# what is freed goes back at once, so that what is held is what is needed
PRECISE = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
NET = [
    "arch=trm",
    "arch.hidden_size=128",
    "arch.num_heads=4",
    "arch.puzzle_emb_ndim=512",
    "arch.puzzle_emb_len=4",
    "arch.H_cycles=1",
    "arch.L_cycles=2",
    "arch.forward_dtype=float32",
    "global_batch_size=768",
    "epochs=1000",
    "eval_interval=null",
    "ema=true",
]


def main() -> None:
    if sys.argv[1:]:
        measure(sys.argv[1], sys.argv[2:])
        return
    with TemporaryDirectory() as scratch:
        write_dataset(Path(scratch), ragged_groups(1000), num_puzzle_identifiers=ROWS)
        ranks = check_ended_well(
            run_ranks(2, ["-m", "tests.bench.bench_table", scratch, *KINDS], timeout=500)
        )
        print(ranks[0].stdout, end="")
        print(f"{'':>12}{'ranks':>8}{'MiB of a rank':>16}")
        for kind in KINDS:
            for count in (1, 2, 4):
                done = check_ended_well(
                    run_ranks(
                        count,
                        ["-m", "tests.bench.bench_table", scratch, kind],
                        timeout=500,
                        env=PRECISE,
                    )
                )
                most = max(float(rank.stdout.split()[-1]) for rank in done)
                print(f"{kind:>12}{count:>8}{most:>16,.0f}")


def measure(data: str, kinds: list[str]) -> None:
    """In every rank: times of several kinds in turns, or what one holds."""
    dist = distributed.start(device="cpu", timeout_s=400)
    before = resident_mib()
    with TemporaryDirectory() as folder:
        rounds = ROUNDS if len(kinds) > 1 else 3
        chosen = {kind: f"arch.puzzle_emb_sharded={KINDS[kind]}" for kind in kinds}
        trainers = {
            kind: trainer_on(dist, Path(folder) / kind, f"data_path={data}", *NET, how)
            for kind, how in chosen.items()
        }
        for trainer in trainers.values():
            for table in trainer.objective.tables().values():
                table.weights.fill_(0.01)  # fresh zeros are not in memory yet
        seconds: dict[str, list[float]] = {kind: [] for kind in trainers}
        for steps in zip(
            *(steps_of(trainer, rounds) for trainer in trainers.values()), strict=True
        ):
            for kind, step in zip(trainers, steps, strict=True):
                dist.barrier()
                start = time.perf_counter()
                step()
                seconds[kind].append(time.perf_counter() - start)
    if len(kinds) == 1:
        ema = trainers[kinds[0]].ema
        assert ema is not None
        with ema.applied():
            pass
        print(resident_mib() - before)
    elif dist.is_main:
        medians = {kind: statistics.median(times[3:]) for kind, times in seconds.items()}
        for kind, median in medians.items():
            print(
                f"{kind:>12}{median * 1000:>12.1f} ms a step, {median / medians['whole']:.2f} of"
                " the whole one's"
            )
    distributed.stop()


def resident_mib() -> float:
    """Returns the process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
