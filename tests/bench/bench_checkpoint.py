"""Saving and resuming at several numbers of ranks, beside torch's own checkpoints:
`python -m tests.bench.bench_checkpoint [WIDTH [RANKS]]`.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.ranks import check_ended_well, run_ranks

RANKS = 1, 2, 4
WIDTH = 384  # of 12 layers; 640: 1.4 GiB of state


def main() -> None:
    width, *counts = map(int, sys.argv[1:] or [str(WIDTH)])
    Path("runs").mkdir(exist_ok=True)  # on the disk of the repository, in a folder that git ignores
    print(
        "| ranks | | stands still, s | published, s | most memory of a save, MiB | files"
        " | resumed, s | memory beyond what is kept, MiB |\n|---|---|---|---|---|---|---|---|"
    )
    for ranks in counts or RANKS:
        for name, suffix in (("ours", ""), ("torch", "_dcp")):
            with tempfile.TemporaryDirectory(dir="runs") as scratch:
                folder = Path(scratch).resolve()
                saved = rows(ranks, f"save{suffix}", folder, width)
                files = [f.stat().st_size for f in folder.glob("**/*") if f.is_file()]
                loaded = rows(ranks, f"load{suffix}", folder, width)
            beyond = max(row["peak"] - max(row["kept"], 0) for row in loaded)
            peaks = " ".join(f"{row['peak']:.0f}" for row in saved)
            print(
                f"| {ranks} | {name} | {most(saved, 'stall'):.2f} | {most(saved, 's'):.2f}"
                f" | {peaks} | {len(files)}, {sum(files) / 2**20:.0f} MiB"
                f" | {most(loaded, 's'):.2f} | {beyond:.0f} |",
                flush=True,
            )


def rows(ranks: int, role: str, folder: Path, width: int) -> list[dict[str, float]]:
    """What the ranks of one job have measured."""
    command = ["-m", "tests.bench.checkpoint_rank", role, str(folder), str(width)]
    env = {"PYTHONWARNINGS": "ignore"}
    done = check_ended_well(run_ranks(ranks, command, timeout=900, env=env))
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith("ROW ")]
    return json.loads(line.removeprefix("ROW "))


def most(measured: list[dict[str, float]], what: str) -> float:
    """Of the rank that takes longest."""
    return max(row[what] for row in measured)


if __name__ == "__main__":
    main()
