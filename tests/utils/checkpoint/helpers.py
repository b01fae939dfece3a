"""Small checkpoints whose tensors all tell one value."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch

from optim.sync.base import Sync
from utils.checkpoint import format, reader
from utils.checkpoint.__main__ import main
from utils.checkpoint.registry import Group, Registry
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist
from utils.ranks.one_by_one import OneByOne

T = TypeVar("T")
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
Groups = dict[str, dict[str, torch.Tensor]]


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
            f"{shard}/{name}": tensor
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


def held(groups: Groups) -> dict[str, OneByOne]:
    """Groups as a single rank gives them to a writer."""
    return {group: OneByOne(tensors, tensors.__getitem__) for group, tensors in groups.items()}


def as_it_is(dist: Dist | None = None, **shared: Group) -> Registry:
    """A registry without shards, whose tensors are whole on every rank."""
    sync = Sync()
    return Registry(META, dist or Dist(), (), shared, {}, sync.gathered, sync.share_of)


class Split(Sync):
    """Every rank holds a block of the weight's rows. The blocks differ in length."""

    def __init__(self, dist: Dist, rows: int) -> None:
        self.dist, self.rows = dist, rows

    def share_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        rank, ranks = self.dist.rank, self.dist.world_size
        edges = [self.rows * each // ranks for each in (rank, rank + 1)]
        return whole[slice(*edges)] if name == "weight" else whole

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((self.rows, *shape[1:])) if name == "weight" else shape

    def whole(self, name: str, share: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (torch.cat(self.dist.all_gather(share)) if name == "weight" else share), 0


class Held(Registry):
    """One rank of a run whose tensors tell a value; keeps what it is given."""

    def __init__(
        self,
        dist: Dist | None = None,
        value: float = 0.0,
        rows: int = 40,
        splits: bool = False,
        **origin: Any,
    ) -> None:
        self.taken: dict[str, Any] = {}
        dist = dist or Dist()
        owned, own = dist.owned_shards(SHARDS), groups(value, rows)
        sync = Split(dist, rows) if splits else Sync()
        own["model"] = {name: sync.share_of(name, each) for name, each in own["model"].items()}
        shared = {
            name: Group(partial(own.__getitem__, name), partial(self._take, name))
            for name in ("model", "ema", "optimizer")
        }
        by_shard = {}
        for name in ("state", "steps"):
            states = {shard: {"0": shard_state(shard, value)[f"{name}/0"]} for shard in owned}
            shapes = {"0": shard_state(0, value)[f"{name}/0"]}
            load = partial(self._take, name)
            by_shard[name] = Group(partial(dict, states), load, lambda *_, own=shapes: own)
        split = sync.gathered, sync.share_of
        super().__init__(META | origin, dist, owned, shared, by_shard, *split)

    def _take(self, name: str, tensors: Any) -> None:
        self.taken[name] = dict(tensors.items())


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
    one.save(step, held(groups(value, rows)), {**META, "value": value, **more}, best)
    assert one.wait() == "", lines
    one.close()
    return directory / f"step_{step}"


@dataclass(frozen=True)
class Beside(Dist):
    """One of several ranks that are threads of this process."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    said: dict[int, Any] = field(default_factory=dict)
    sent: dict[int, SimpleQueue[torch.Tensor]] = field(default_factory=dict)

    def all_gather_text(self, text: str) -> list[str]:
        return self._exchange(text)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange(tensor.clone())

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor.clone())[0])

    def to_main(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == source != 0:
            self.sent[source].put(tensor.clone())
        return self.sent[source].get(timeout=60) if self.is_main and source else tensor

    def _exchange(self, thing: Any) -> list[Any]:
        self.said[self.rank] = thing
        self.meeting.wait(60)
        everyone = [self.said[rank] for rank in range(self.world_size)]
        self.meeting.wait(60)
        return everyone


def on_ranks(ranks: int, work: Callable[[Dist], T]) -> list[T]:
    """What this comes to on each of so many ranks."""
    meeting, said = threading.Barrier(ranks), dict[int, Any]()
    sent = {rank: SimpleQueue[torch.Tensor]() for rank in range(ranks)}
    beside = [Beside(rank, ranks, meeting=meeting, said=said, sent=sent) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(work, beside)]


def together(
    directory: Path, ranks: int, step: int, value: float | None = None, splits: bool = False
) -> list[str]:
    """The same checkpoint as `alone` saves, by several ranks; how each of them sees the save."""
    value = float(step) if value is None else value

    def save(dist: Dist) -> str:
        one = Writer(directory, dist, lambda line: None, keep=None)
        one.save(step, Held(dist, value, splits=splits).snapshot({})[0], {**META, "value": value})
        outcome = one.wait()
        one.close()
        return outcome

    return on_ranks(ranks, save)


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
