"""Measures the cost of a checkpoint: how long training stands still, and how much slower it is
while the disk is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist

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


if __name__ == "__main__":
    main()
