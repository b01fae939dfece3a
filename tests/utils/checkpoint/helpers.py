"""Small checkpoints whose tensors all tell one value."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from optim.sync.base import Sync
from utils.checkpoint import format, reader
from utils.checkpoint.__main__ import main
from utils.checkpoint.format import Slice
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist

SHARDS = 8
# what a run says of itself beside its tensors
META = {
    "config": {"shards": SHARDS},
    "data": {"the dataset": "x", "the evaluation set val": "9 y"},
    "code": "",
    "torch": "2",
    "threads": 1,
    "compile": False,
    "device": "cpu",
    "wandb_id": None,
    "lr": 0.1,
    "frozen": {},
    "needed_runs": {},
    "evaluation_due": False,
    "results": {},
    "best": None,
    "best_of": "",
    "resumed_from": "",
}
Groups = dict[str, dict[str, torch.Tensor | Slice]]


def groups(value: float, rows: int = 40, owned: Iterable[int] = range(SHARDS)) -> Groups:
    """Tensors of several kinds that all tell the value."""
    return {
        "model": {
            "weight": torch.full((rows, 30), value),
            "half": torch.tensor([value], dtype=torch.bfloat16),
            "none": torch.empty(0, 3),
        },
        "ema": {"average": torch.full((2, 3), value)},
        "optimizer": {"count": torch.tensor(int(value))},
        "shards": {
            f"{shard}/{name}": Slice.whole(tensor)
            for shard in owned
            for name, tensor in shard_state(shard, value).items()
        },
    }


def shard_state(shard: int, value: float) -> dict[str, torch.Tensor]:
    return {
        "state/0": torch.arange(6.0).view(2, 3) + 100 * shard + value,
        "steps/0": torch.tensor([shard, shard], dtype=torch.int32),
    }


def value_of(path: Path) -> float:
    """The one value that all of a checkpoint tells; a mixture of two saves is an error."""
    loaded, meta = reader.load(path)
    values = {
        loaded["model"]["weight"].max().item(),
        loaded["ema"]["average"].min().item(),
        float(loaded["optimizer"]["count"]),
    }
    values |= {loaded["shards"][f"{n}/state/0"][0, 0].item() - 100 * n for n in range(SHARDS)}
    assert values == {meta["value"]}, (values, meta)
    return meta["value"]


def as_it_is() -> Sync:
    """Answers a registry for a single rank, with nothing split."""
    sync = Sync()
    sync.wrap(torch.nn.Module(), Dist())
    return sync


def alone(
    directory: Path,
    step: int,
    value: float | None = None,
    keep: int | None = None,
    best: bool = False,
    rows: int = 40,
    **more: Any,
) -> Path:
    """A whole checkpoint, saved by a single rank."""
    value = float(step) if value is None else value
    lines: list[str] = []
    one = Writer(directory, Dist(), lines.append, keep=keep)
    one.save(step, groups(value, rows), {**META, "value": value, **more}, best)
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


def ranks_beside(ranks: int) -> list[Beside]:
    meeting, said, store = threading.Barrier(ranks), dict[int, str](), c10d.HashStore()
    return [Beside(rank, ranks, store=store, meeting=meeting, said=said) for rank in range(ranks)]


def together(directory: Path, ranks: int, step: int, value: float | None = None) -> list[str]:
    """The same checkpoint as `alone` saves, by several ranks; how each of them sees the save."""
    value = float(step) if value is None else value

    def save(dist: Beside) -> str:
        one = Writer(directory, dist, lambda line: None, keep=None)
        state = groups(value, owned=dist.owned_shards(SHARDS))
        one.save(step, state, {**META, "value": value})
        outcome = one.wait()
        one.close()
        return outcome

    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(save, ranks_beside(ranks))]


def declare(folder: Path) -> None:
    """A manifest that vouches for whatever lies in the folder."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": format.sha256_of(file)}
        for file in folder.iterdir()
        if file.name != format.MANIFEST
    }
    format.write_manifest(folder, files)


def flip(file: Path, place: int = -1) -> None:
    """Changes one bit of a byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """What a command prints."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert not (out if status == 2 else err)
    if status == 2:
        assert err.count("\n") == 1
    return out + err
