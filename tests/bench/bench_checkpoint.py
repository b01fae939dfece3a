"""Measures the cost of a checkpoint: how long training stands still, how much slower it is while
the disk is written, and what saving and resuming take at several numbers of ranks, beside torch's
own checkpoints and another checkout: `python -m tests.bench.bench_checkpoint [FOLDER [WIDTH]]`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.ranks import ROOT, check_ended_well, free_port, run_as
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist

RANKS = 1, 2, 4
WIDTH = 384  # of 12 layers; 640: 1.4 GiB of state
WEIGHTS, GROUPS, SAVES = 27_275_266, 4, 4  # HRM's parameters; the model, two moments, the average


def steps_per_second(seconds: float) -> float:
    """Some work of the kind a training step does, for a while."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b, out=b).clamp_(-1, 1)
        count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    torch.set_num_threads(1)
    tensors = {f"layer{i}": torch.randn(WEIGHTS // 50) for i in range(50)}
    groups = {f"group{i}": dict(tensors) for i in range(GROUPS)}
    size = sum(t.nbytes for group in groups.values() for t in group.values())
    # on the disk of the repository, in a folder that git ignores: a kill leaves it behind
    Path("runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="runs") as scratch:
        writer = Writer(Path(scratch), Dist(), print, keep=1)
        rows = []
        for step in range(SAVES):
            started = time.perf_counter()
            writer.save(2 * step, groups, {0: {}}, {})
            writer.wait()
            written = time.perf_counter() - started
            writer.take_stall_s()  # waiting counts as well
            free = steps_per_second(0.3)
            writer.save(2 * step + 1, groups, {0: {}}, {})
            stall = writer.take_stall_s()
            busy = steps_per_second(0.3)
            writer.wait()
            rows.append((stall, written, busy / free))
        writer.close()
    print(f"{size / 2**20:.0f} MiB in {GROUPS} groups\n")
    print(
        "| save | training stands still, s | on the disk after, s | speed meanwhile"
        " |\n|---|---|---|---|"
    )
    print("| first | {:.3f} | {:.2f} | {:.2f} |".format(*rows[0]))
    print(
        "| later (median) | {:.3f} | {:.2f} | {:.2f} |".format(
            *(statistics.median(column) for column in zip(*rows[1:], strict=True))
        )
    )
    before = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    by_ranks(before, int(sys.argv[2]) if len(sys.argv) > 2 else WIDTH)


def by_ranks(before: Path | None, width: int) -> None:
    """Saves and resumes of this checkout, of the one `before`, and of torch.distributed.checkpoint,
    one after the other at each number of ranks.
    """
    ways = {"before": before} if before is not None else {}
    ways |= {"now": ROOT}
    print(
        "\n| ranks | | stands still, s | published, s | most memory of a save, MiB | files"
        " | resumed, s | memory beyond what is kept, MiB |\n|---|---|---|---|---|---|---|---|"
    )
    for ranks in RANKS:
        with tempfile.TemporaryDirectory(dir="runs") as scratch:
            raw = written_s(Path(scratch), width)
        for name, checkout in [*ways.items(), ("torch", None)]:
            suffix = "_dcp" if checkout is None else ""
            with tempfile.TemporaryDirectory(dir="runs") as scratch:
                folder = Path(scratch).resolve()
                saved = rows(ranks, f"save{suffix}", folder, checkout or ROOT, width)
                files = [f.stat().st_size for f in folder.glob("**/*") if f.is_file()]
                loaded = rows(ranks, f"load{suffix}", folder, checkout or ROOT, width)
            beyond = max(row["peak"] - max(row["kept"], 0) for row in loaded)
            peaks = " ".join(f"{row['peak']:.0f}" for row in saved)
            print(
                f"| {ranks} | {name} | {most(saved, 'stall'):.2f} | {most(saved, 's'):.2f}"
                f" | {peaks} | {len(files)}, {sum(files) / 2**20:.0f} MiB"
                f" | {most(loaded, 's'):.2f} | {beyond:.0f} |",
                flush=True,
            )
        print(
            f"| {ranks} | as many bytes, by one process, fsync | | {raw:.2f} | | | | |", flush=True
        )


def rows(ranks: int, role: str, folder: Path, checkout: Path, width: int) -> list[dict[str, float]]:
    """What the ranks of one job have measured."""
    script = Path(__file__).with_name("checkpoint_rank.py")
    common = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    common["PYTHONWARNINGS"] = "ignore"
    envs = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    arguments = [str(script), role, str(folder), str(width)]
    done = check_ended_well(run_as(envs, arguments, timeout=900, cwd=checkout))
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith("ROW ")]
    return json.loads(line.removeprefix("ROW "))


def most(measured: list[dict[str, float]], what: str) -> float:
    """Of the rank that takes longest."""
    return max(row[what] for row in measured)


def written_s(folder: Path, width: int) -> float:
    """Seconds to write as many bytes to the disk as a checkpoint has."""
    layer = 12 * width * width
    size = 4 * 4 * (50304 * width + 12 * layer)
    chunk, started = os.urandom(1 << 24), time.perf_counter()
    with open(folder / "raw", "wb", buffering=0) as stream:
        for _ in range(-(-size // len(chunk))):
            stream.write(chunk)
        os.fsync(stream.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
