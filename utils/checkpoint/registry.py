"""The parts that a run saves. Each is registered by name; the checkpoint code knows no names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from utils import revision
from utils.checkpoint.contents import Stored
from utils.checkpoint.slices import RowRange, Slice
from utils.errors import ConfigError

Tensors = Mapping[str, Tensor]
ByShard = Mapping[int, Tensors]
Offered = dict[str, Tensor | Slice]  # a whole tensor, equal on all ranks, or this rank's rows
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
    best: float | None = None  # the best value of the metric `best_of`
    best_of: str = ""
    resumed_from: str = ""  # the checkpoint that `resume` named, once the run has started from it

    def load(self, meta: Mapping[str, Any]) -> None:
        """Takes the fields that a checkpoint's metadata has."""
        for each in fields(self):
            if each.name in meta:
                setattr(self, each.name, meta[each.name])


@dataclass(frozen=True)
class Origin:
    """Describes the run that writes a checkpoint."""

    config: str
    fingerprint: str  # of the data
    wandb_id: str | None
    lr: float  # the schedule's rate at the last step
    frozen: FrozenFiles
    code: str
    torch: str
    threads: int

    @classmethod
    def here(
        cls, config: str, fingerprint: str, wandb_id: str | None, lr: float, frozen: FrozenFiles
    ) -> Origin:
        """Adds what this process knows: the code's revision, PyTorch's version, and threads."""
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
        """Returns what to tell the user when this run continues a checkpoint: one line for each
        difference that can change results.
        """
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


class RowRanges(Protocol):
    """Knows which rows of a tensor this rank holds: see `optim/sync/base.py`."""

    def row_range(self, name: str, ndim: int) -> RowRange | None: ...


class RowsOfRank(Tensors):
    """The tensors of one part of a checkpoint, each cut to this rank's rows. Lazy: reads a tensor
    when it is accessed.
    """

    def __init__(self, saved: Mapping[str, Stored], row_ranges: RowRanges) -> None:
        self._saved, self._row_ranges = saved, row_ranges

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[name].read(*self._range(name))

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Reads into a live tensor, block by block if device or dtype differ."""
        saved, (first, stop) = self._saved[name], self._range(name)
        live = _local(tensor)
        if live.ndim:
            live[stop - first :].zero_()  # padding of the last rank's block
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
        rows = self._row_ranges.row_range(name, len(shape))
        return rows[:2] if rows else (0, shape[0] if shape else 1)


class Registry:
    """The parts of a run that checkpoints hold, its progress, and what describes its code."""

    def __init__(self, origin: Callable[[], Origin], row_ranges: RowRanges) -> None:
        self.run_state, self.origin = RunState(), origin
        self._row_ranges = row_ranges
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
        """Registers a part that all ranks share: equal on all, or split by rows.

        Args:
            name: the part's name in checkpoints.
            state: returns its live tensors.
            load: restores them; gets this rank's rows of a saved `state`.
            like: called with a checkpoint's tensors and step; returns the names, shapes and types
                that they must have. Default: those of `state` now.
            any_precision: whether floats of other types are accepted.
            otherwise: what the error tells the user to do if a checkpoint lacks this part.
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
        """Registers state that belongs to shards; each rank has that of its own shards.

        `state` returns it by shard, `load` gets it by shard, and `like` is called for each shard.
        """
        self._by_shard[name] = _Part(state, load, like, any_precision)

    @property
    def names(self) -> list[str]:
        """The parts that all ranks share, in the order of their registration."""
        return list(self._shared)

    def snapshot(self) -> tuple[dict[str, Offered], dict[int, dict[str, Tensor]], dict[str, Any]]:
        """Returns all that a run needs to continue bit by bit: the shared parts, the state of this
        rank's shards, and values for JSON.
        """
        shards: dict[int, dict[str, Tensor]] = {}
        for name, part in self._by_shard.items():
            for shard, tensors in part.state().items():
                shards.setdefault(shard, {}).update(
                    {f"{name}/{key}": tensor for key, tensor in tensors.items()}
                )
        groups = {name: self._offered(part.state()) for name, part in self._shared.items()}
        return groups, shards, asdict(self.run_state) | asdict(self.origin())

    def check(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved], step: int) -> None:
        """Raises ConfigError unless every part can load a checkpoint. Reads no tensors yet."""
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
        """Returns the files of a checkpoint that `load` reads on this rank."""
        every = [RowsOfRank(groups[name], self._row_ranges).files() for name in self._shared]
        for saved in shards.values():
            every += [{file.name for file, _ in stored.pieces} for stored in saved.values()]
        return set().union(*every)

    def load(self, groups: Mapping[str, Saved], shards: Mapping[int, Saved]) -> None:
        """Restores all parts from a checkpoint that `check` has accepted."""
        for name, part in self._shared.items():
            part.load(RowsOfRank(groups[name], self._row_ranges))
        read = {
            shard: {name: stored.read() for name, stored in saved.items()}
            for shard, saved in shards.items()
        }
        for name, owned in self._by_shard.items():
            owned.load({shard: _within(name, tensors) for shard, tensors in read.items()})

    def _whole(self, tensors: Tensors) -> Tensors:
        """Gives tensors the shapes that they have in a checkpoint."""
        shapes = dict(tensors)
        for name, tensor in tensors.items():
            if rows := self._row_ranges.row_range(name, tensor.ndim):
                shape = (rows.of, *tensor.shape[1:])
                shapes[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return shapes

    def _offered(self, tensors: Tensors) -> Offered:
        """Returns the tensors, or this rank's rows of them, that a checkpoint may take."""
        offered: Offered = {}
        for name, tensor in tensors.items():
            rows = self._row_ranges.row_range(name, tensor.ndim)
            if rows is None or rows.of == 0:
                offered[name] = _local(tensor)
            elif rows.stop > rows.first:
                block = _local(tensor)[: rows.stop - rows.first]
                offered[name] = Slice(block, rows.first, rows.of)
        return offered


def _local(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor as a plain tensor; other tensors as they are."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _shapes(saved: Saved) -> Tensors:
    return {name: stored.meta for name, stored in saved.items()}


def check_alike(own: Tensors, saved: Tensors, what: str, any_precision: bool = False) -> None:
    """Raises ConfigError unless names, shapes and types are equal; with `any_precision`, types of
    floats may differ.
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
    """Returns the tensors of one part, without its name in front."""
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}/")
    }
