"""Small checkpoints whose tensors all tell one value."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from optim.sync.common import Common
from utils.checkpoint import manifest
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist

SHARDS = 8
# what a run says of itself beside its tensors
META = {
    "config": f"shards: {SHARDS}\n",
    "fingerprint": "x",
    "code": "",
    "torch": "2",
    "threads": 1,
    "wandb_id": None,
    "evaluation_due": False,
    "results": {},
    "best": None,
    "best_of": "",
    "resumed_from": "",
}
Group = dict[str, torch.Tensor]


def groups(value: float, rows: int = 40) -> dict[str, Group]:
    """Tensors of several kinds that all tell the value."""
    model = {
        "weight": torch.full((rows, 30), value),
        "half": torch.tensor([value], dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
    }
    return {
        "model": model,
        "ema": {"weight": torch.full((2, 3), value)},
        "optimizer": {"count": torch.tensor(int(value))},
    }


def as_it_is() -> Common:
    """Answers a registry for a single rank, with nothing split."""
    sync = Common()
    sync.begin({}, Dist())
    return sync


def shard_state(shard: int, value: float) -> Group:
    return {
        "state/0": torch.arange(6.0).view(2, 3) + 100 * shard + value,
        "steps": torch.tensor([shard, shard], dtype=torch.int32),
    }


def alone(
    directory: Path,
    step: int,
    value: float | None = None,
    keep: int | None = None,
    best: bool = False,
    **more: Any,
) -> Path:
    """A whole checkpoint, saved by a single rank."""
    value = float(step) if value is None else value
    lines: list[str] = []
    one = Writer(directory, Dist(), lines.append, keep=keep)
    one.save(
        step,
        groups(value),
        {shard: shard_state(shard, value) for shard in range(SHARDS)},
        {**META, "value": value, **more},
        best,
    )
    assert one.wait() == "", lines
    one.close()
    return directory / f"step_{step}"


@dataclass(frozen=True)
class Beside(Dist):
    """One of several ranks that are threads of this process."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    said: dict[int, str] = field(default_factory=dict)

    def all_gather_text(self, text: str) -> list[str]:
        self.said[self.rank] = text
        self.meeting.wait(60)
        everyone = [self.said[rank] for rank in range(self.world_size)]
        self.meeting.wait(60)
        return everyone


def together(directory: Path, ranks: int, step: int, value: float | None = None) -> list[str]:
    """The same checkpoint as `alone` saves, by several ranks; how each of them sees the save."""
    value = float(step) if value is None else value
    meeting, said, store = threading.Barrier(ranks), dict[int, str](), c10d.HashStore()

    def save(rank: int) -> str:
        dist = Beside(rank, ranks, store=store, meeting=meeting, said=said)
        one = Writer(directory, dist, lambda line: None, keep=None)
        shards = {shard: shard_state(shard, value) for shard in dist.owned_shards(SHARDS)}
        one.save(step, groups(value), shards, {**META, "value": value})
        outcome = one.wait()
        one.close()
        return outcome

    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(save, range(ranks))]


def declare(folder: Path) -> None:
    """A manifest that vouches for whatever lies in the folder."""
    files = {
        entry.name: manifest.entry_of(entry)
        for entry in folder.iterdir()
        if entry.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(manifest.text_of(files))
