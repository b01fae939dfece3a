"""One rank of the launcher tests: uses every collective once and writes down the results."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from contract import Noise
from utils.errors import ConfigError, PeerError
from utils.measure.metrics import Meter
from utils.ranks import distributed
from utils.ranks.distributed import Dist

TEXTS = ["", "naïve – 数独 ✓", "a\udcffb", "x" * 100_000]


def error_of(call) -> str:
    try:
        call()
    except (ConfigError, PeerError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def agree(dist: Dist, failing: tuple[int, ...], kind: type[Exception]) -> None:
    with dist.agreed():
        if dist.rank in failing:
            raise kind(f"rank {dist.rank} cannot")


def agree_alike(dist: Dist) -> None:
    with dist.agreed(), dist.agreed():
        raise ConfigError("nobody can")


def agree_twice(dist: Dist) -> None:
    with dist.agreed(), dist.main_first():
        if dist.rank == 1:
            raise ConfigError("rank 1 cannot")


def fill_cache(dist: Dist, file: Path, fail: bool) -> str:
    with dist.main_first():
        if fail and dist.is_main:
            raise ConfigError("disk full")
        if not dist.is_main:
            return file.read_text()
        time.sleep(0.3)
        file.write_text("filled")
        return "filled"


def metrics(dist: Dist) -> list[dict[str, float]]:
    """Means when all ranks add, when only the last one does, and when none does."""
    shards = 8
    meter = Meter()
    for step in range(3):
        owned = dist.owned_shards(shards)
        values = Noise(1, step, owned).uniform("loss", (4 * len(owned),)).double()
        meter.add(
            {
                "loss": (values.sum(), torch.tensor(values.numel())),
                "never": (torch.tensor(0), torch.tensor(0)),
            }
        )
    reads = [meter.read(dist)]
    if dist.rank == dist.world_size - 1:
        meter.add({"loss": (torch.tensor(6.0), torch.tensor(4))})
    return [*reads, meter.read(dist), meter.read(dist)]


def main(folder: Path) -> None:
    dist = distributed.start(device="cpu", timeout_s=30)
    total = torch.tensor([dist.rank + 1.0])
    dist.all_reduce(total)
    strided = (torch.arange(12).view(3, 4) + 100 * dist.rank)[:, ::2]
    copied = torch.full((3,), float(dist.rank + 5))
    dist.broadcast(copied)
    mine = (torch.arange(6).view(2, 3) == 1 + dist.rank).t()
    ranks = range(dist.world_size)
    at_main = [dist.to_main(r, mine if r == dist.rank else mine.to("meta")) for r in ranks]
    result = {
        "launch": [dist.launcher, dist.rank, dist.world_size, dist.local_rank],
        "sum": total.item(),
        "sums": dist.sums([1.0, 10.0 * dist.rank]),
        "all_to_all": dist.all_to_all(
            torch.arange(8).view(2, 4).t()[:, 1:] + 100 * dist.rank
        ).tolist(),
        "at main": [tensor.tolist() for tensor in at_main] if dist.is_main else [],
        "gathered": [part.tolist() for part in dist.all_gather(strided)],
        "copied": copied.tolist(),
        "broadcast": [
            dist.broadcast_text(text if dist.is_main else "not this") == text for text in TEXTS
        ],
        "texts": dist.all_gather_text("ü" * dist.rank),
        "agreed": [
            error_of(lambda: agree(dist, (), ConfigError)),
            error_of(lambda: agree(dist, (1,), ConfigError)),
            error_of(lambda: agree(dist, (0, 1), ConfigError)),
            error_of(lambda: agree(dist, (1,), OSError)),
            error_of(lambda: agree_twice(dist)),
            error_of(lambda: agree_alike(dist)),
        ],
        "cache": fill_cache(dist, folder / "cache", fail=False),
        "cache_error": error_of(lambda: fill_cache(dist, folder / "cache", fail=True)),
        "metrics": metrics(dist),
        "again": distributed.start(device="cpu", timeout_s=30) == dist,
    }
    dist.sums([1.0])
    distributed.stop()
    distributed.stop()
    (folder / f"{dist.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
