"""Measures the cost of `exact=true`: the demo's step, side by side with the fast path."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.runs import QUIET, train

STEPS, ROUNDS = 40, 3


def step_ms(directory: Path, exact: bool, ranks: int) -> float:
    """Median over the rows of one run, the first ones left out."""
    arguments = [
        "experiment=demo",
        f"max_steps={STEPS}",
        f"exact={str(exact).lower()}",
        "eval_batch_size=500",
        *QUIET,
    ]
    return statistics.median(
        train(directory, *arguments, ranks=ranks, timeout=300).series("speed/step_ms")[10:]
    )


def main() -> None:
    print("| ranks | fast, ms per step | exact, ms per step | exact/fast |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in (1, 2):
            rounds = [
                [
                    step_ms(Path(scratch) / f"{ranks}-{number}-{exact}", exact, ranks)
                    for exact in (False, True)
                ]
                for number in range(ROUNDS)
            ]
            fast, exact = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(slow / quick for quick, slow in rounds)
            print(f"| {ranks} | {fast:.0f} | {exact:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
