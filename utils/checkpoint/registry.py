"""The parts that a run saves. Each enters itself by name; the checkpoint code knows no names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from utils import revision
from utils.checkpoint.contents import Stored
from utils.checkpoint.slices import Rows, Slice
from utils.errors import ConfigError

Tensors = Mapping[str, Tensor]
ByShard = Mapping[int, Tensors]
Held = dict[str, Tensor | Slice]  # whole, as every rank has it, or this rank's rows
Like = Callable[[Tensors, int], Tensors]
# parts that are loaded from files of their own: `path` and `sha256` of each
FrozenFiles = Mapping[str, Mapping[str, str]]
Saved = Mapping[str, Stored]  # of one part, or of one shard
S = TypeVar("S")
BLOCK = 1 << 26  # bytes on their way to a device


@dataclass
class RunState:
    """The progress of a run."""

    step: int = 0
    evaluation_due: bool = False
    results: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: float | None = None  # value of the metric that the run is judged by, and which that is
    best_of: str = ""
    resumed_from: str = ""  # what `resume` named, once that is behind the run

    def load(self, meta: Mapping[str, Any]) -> None:
        """Go on from where a checkpoint says, as far as it does."""
        for each in fields(self):
            if each.name in meta:
                setattr(self, each.name, meta[each.name])


@dataclass(frozen=True)
class Origin:
    """The run that has written a checkpoint."""

    config: str
    fingerprint: str  # of the data
    wandb_id: str | None
    lr: float  # of the step that was taken last, as the schedule has it for the run's length
    frozen: FrozenFiles
    code: str
    torch: str
    threads: int

    @classmethod
    def here(
        cls, config: str, fingerprint: str, wandb_id: str | None, lr: float, frozen: FrozenFiles
    ) -> Origin:
        """As this process writes it."""
        return cls(
            config,
            fingerprint,
            wandb_id,
            lr,
            frozen,
            revision.summary(),
            torch.__version__,
            torch.get_num_threads(),
        )

    def differences(self, meta: Mapping[str, Any]) -> list[str]:
        """Returns what to tell the user about a checkpoint that this run continues."""
        lines = []
        for what, now in (("threads", self.threads), ("torch", self.torch)):
            if meta.get(what, now) != now:
                lines.append(
                    f"{what}: {meta[what]} when the checkpoint was written, {now} now; the run goes"
                    " on, with other rounding"
                )
        if meta.get("code", "") not in ("", self.code):
            lines.append(
                "the code has changed since the checkpoint: "
                + " ".join(meta["code"].split())
                + " then"
            )
        step, before, after = (
            meta.get("step"),
            *(f"{rate:.6g}" for rate in (meta.get("lr", self.lr), self.lr)),
        )
        if before != after and step:
            lines.append(
                f"the learning rate jumps at step {step} from {before} to {after}, because the run"
                " has another length now"
            )
        return lines


@dataclass(frozen=True)
class _Part(Generic[S]):
    state: Callable[[], S]
    load: Callable[[S], object]
    like: Like
    any_precision: bool
    otherwise: str = ""

    def check(self, tensors: Tensors, step: int, what: str) -> None:
        check_alike(self.like(tensors, step), tensors, what, self.any_precision)


class Shares(Protocol):
    """Knows which rows of a tensor this rank holds: see `optim/sync/base.py`."""

    def rows(self, name: str, ndim: int) -> Rows | None: ...


class Own(Tensors):
    """This rank's rows of what a checkpoint holds of one part, read when they are asked for."""

    def __init__(self, saved: Mapping[str, Stored], shares: Shares) -> None:
        self._saved, self._shares = saved, shares

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[name].read(*self._range(name))

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Reads into a live tensor, by blocks where that is elsewhere or of another type."""
        saved, (first, stop) = self._saved[name], self._range(name)
        live = _local(tensor)
        if live.ndim:
            live[stop - first :].zero_()  # of a block that has more room than rows
            live = live[: stop - first]
        if live.is_cpu and live.is_contiguous() and live.dtype == saved.meta.dtype:
            saved.read_into(live, first)
        elif not live.ndim:
            live.copy_(saved.read())
        else:
            at_once = max(1, BLOCK * len(live) // max(1, live.nbytes))
            for start in range(0, len(live), at_once):
                block = live[start : start + at_once]
                block.copy_(saved.read(first + start, first + start + len(block)))

    def files(self) -> set[str]:
        """The files in which these rows lie."""
        return {
            file.name
            for name, saved in self._saved.items()
            for file, _ in saved.lying_in(*self._range(name))
        }

    def _range(self, name: str) -> tuple[int, int]:
        shape = self._saved[name].shape
        rows = self._shares.rows(name, len(shape))
        return rows[:2] if rows else (0, shape[0] if shape else 1)


class Registry:
    """The parts of a run that checkpoints hold, where it stands, and what writes it."""

    def __init__(self, origin: Callable[[], Origin], shares: Shares) -> None:
        self.run_state, self.origin = RunState(), origin
        self._shares = shares
        self._shared: dict[str, _Part[Tensors]] = {}
        self._by_shard: dict[str, _Part[ByShard]] = {}

    def add(
        self,
        name: str,
        state: Callable[[], Tensors],
        load: Callable[[Tensors], object],
        like: Like | None = None,
        any_precision: bool = False,
        otherwise: str = "use a checkpoint of this command",
    ) -> None:
        """Enter what all ranks have the same of, or their shares of it.

        `state` gives live tensors. `like` makes, of what a checkpoint of some step holds, what it
        must be like in names, shapes and types: what `state` gives now, if nothing is said.
        `otherwise`: what the user can do where a checkpoint has no such part.
        """
        own = like or (lambda saved, step: state())
        self._shared[name] = _Part(
            state, load, lambda saved, step: self._whole(own(saved, step)), any_precision, otherwise
        )

    def add_by_shard(
        self,
        name: str,
        state: Callable[[], ByShard],
        load: Callable[[ByShard], object],
        like: Like,
        any_precision: bool = False,
    ) -> None:
        """Enter what belongs to shards, of which every rank has its own; `like` is asked of each
        shard.
        """
        self._by_shard[name] = _Part(state, load, like, any_precision)

    @property
    def names(self) -> list[str]:
        """The parts that all ranks share, in the order in which they were entered."""
        return list(self._shared)

    def snapshot(self) -> tuple[dict[str, Held], dict[int, dict[str, Tensor]], dict[str, Any]]:
        """All that makes a run go on as if nothing had happened: what ranks share, what this rank's
        shards have, and what is JSON.
        """
        shards: dict[int, dict[str, Tensor]] = {}
        for name, part in self._by_shard.items():
            for shard, tensors in part.state().items():
                shards.setdefault(shard, {}).update(
                    {f"{name}/{key}": tensor for key, tensor in tensors.items()}
                )
        groups = {name: self._held(part.state()) for name, part in self._shared.items()}
        return groups, shards, asdict(self.run_state) | asdict(self.origin())

    def check(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved], step: int) -> None:
        """A ConfigError unless every part can take its share of a checkpoint; nothing is read
        yet.
        """
        for name, part in self._shared.items():
            if name not in groups:
                raise ConfigError(f"it holds no {name}; {part.otherwise}")
            part.check(_shapes(groups[name]), step, name)
        for shard, saved in shards.items():
            tensors = _shapes(saved)
            for name, owned in self._by_shard.items():
                owned.check(_within(name, tensors), step, f"shard {shard}, {name}")
            for key in tensors:
                if key.partition("/")[0] not in self._by_shard:
                    raise ConfigError(
                        f"shard {shard}: it holds {key}, which this run has not; use the code that"
                        " wrote it"
                    )

    def files(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved]) -> set[str]:
        """The files of a checkpoint that `load` reads on this rank."""
        every = [Own(groups[name], self._shares).files() for name in self._shared]
        for saved in shards.values():
            every += [{file.name for file, _ in stored.pieces} for stored in saved.values()]
        return set().union(*every)

    def load(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved]) -> None:
        """Go on from what has been checked."""
        for name, part in self._shared.items():
            part.load(Own(groups[name], self._shares))
        read = {
            shard: {name: stored.read() for name, stored in saved.items()}
            for shard, saved in shards.items()
        }
        for name, owned in self._by_shard.items():
            owned.load({shard: _within(name, tensors) for shard, tensors in read.items()})

    def _whole(self, tensors: Tensors) -> Tensors:
        """In the shapes that a checkpoint has."""
        rows = {name: self._shares.rows(name, tensor.ndim) for name, tensor in tensors.items()}
        return {
            name: torch.empty(rows_.of, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
            if (rows_ := rows[name])
            else tensor
            for name, tensor in tensors.items()
        }

    def _held(self, tensors: Tensors) -> Held:
        """Returns the tensors that this rank offers to a checkpoint."""
        held: Held = {}
        for name, tensor in tensors.items():
            rows = self._shares.rows(name, tensor.ndim)
            if rows is None or rows.of == 0:
                held[name] = _local(tensor)
            elif rows.stop > rows.first:
                block = _local(tensor)[: rows.stop - rows.first]
                held[name] = Slice(block, rows.first, rows.of)
        return held


def _local(tensor: Any) -> Tensor:
    """A tensor's content on this rank, without what PyTorch knows of other ranks."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _shapes(saved: Saved) -> Tensors:
    return {name: stored.meta for name, stored in saved.items()}


def check_alike(own: Tensors, saved: Tensors, what: str, any_precision: bool = False) -> None:
    """A ConfigError unless names, shapes and types are the same; with any precision, floats may be
    of another type.
    """
    fix = "use the arch and data of the run that wrote it"
    for key in own:
        if key not in saved:
            raise ConfigError(f"{what}: {key} is missing from it; {fix}")
        there, here = tuple(saved[key].shape), tuple(own[key].shape)
        if there != here:
            raise ConfigError(f"{what}: {key} has shape {there} there and {here} here; {fix}")
        theirs, ours = saved[key].dtype, own[key].dtype
        if theirs != ours and not (
            any_precision and theirs.is_floating_point and ours.is_floating_point
        ):
            raise ConfigError(f"{what}: {key} is of {theirs} there and of {ours} here; {fix}")
    for key in saved:
        if key not in own:
            raise ConfigError(
                f"{what}: it holds {key}, which this model has not; use the arch of the run that"
                " wrote it"
            )


def _within(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of one part, by their own names."""
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}/")
    }
