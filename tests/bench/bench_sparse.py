"""Time of a sparse SignSGD step for tables of 10^3 to 10^7 rows: it must follow the batch, not the
table.

    python -m tests.bench.bench_sparse

One process, 768 look-ups of 512 different rows per step; the lazy average (EMA) hangs on the hook,
as in a run. Tables take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from models.sparse_embedding import SparseEmbedding
from optim.sparse_signsgd import SparseSignSGD
from utils.averages import EMA
from utils.ranks.distributed import Dist

BATCH = 768
DIFFERENT = 512


class Case:
    """One table with its optimizer and average."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows = rows
        self.table = SparseEmbedding(rows, width)
        self.table.weights.fill_(0.01)  # fresh zeros are not in memory yet
        self.optimizer = SparseSignSGD(
            {"table": self.table}, BATCH, Dist(), lr=1e-2, weight_decay=0.1
        )
        self.ema = EMA({}, {"table": self.table}, 0.999)
        self.optimizer.before_update.append(self.ema.before_rows_change)
        self.milliseconds: list[float] = []

    def step(self) -> None:
        # As many different rows in every table, or a small one would have less to do.
        different = torch.randint(
            0, self.rows // DIFFERENT, (DIFFERENT,)
        ) * DIFFERENT + torch.randperm(DIFFERENT)
        ids = torch.cat((different, different[: BATCH - DIFFERENT]))
        self.table(ids).square().sum().backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.ema.update()
        self.milliseconds.append((time.perf_counter() - start) * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--max-exponent", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = [Case(10**exponent, options.width) for exponent in range(3, options.max_exponent + 1)]
    for _ in range(options.rounds):
        for case in cases:
            case.step()
    print(
        f"{'rows':>12}{'ms per step, median of ' + str(options.rounds):>32}{'of the smallest':>18}"
    )
    medians = [statistics.median(case.milliseconds) for case in cases]
    for case, median in zip(cases, medians, strict=True):
        print(f"{case.rows:>12,}{median:>32.3f}{median / medians[0]:>18.2f}")


if __name__ == "__main__":
    main()
