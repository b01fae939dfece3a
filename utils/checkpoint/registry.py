"""What a run saves. Each group of tensors is registered by name; the checkpoint code knows no
names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from utils import revision
from utils.checkpoint.format import Slice, Stored
from utils.errors import ConfigError, short
from utils.rows import RowRange

Tensors = Mapping[str, Tensor]
ByShard = Mapping[int, Tensors]
Saved = Mapping[str, Stored]  # one group
Like = Callable[[Tensors, int], Tensors]
# parts of a net that are loaded from files of their own: `path` and `sha256` of each
FrozenFiles = Mapping[str, Mapping[str, str]]
S = TypeVar("S")
SHARDS = "shards"  # the group of all that belongs to shards: `3/carry/state`
EVALUATED = "the evaluation set "  # and its name: a part of the data
OTHERWISE = "use a checkpoint of this command"
BYTES_AT_ONCE = 1 << 26  # bytes on their way to a device


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

    config: Mapping[str, Any]
    data: Mapping[str, str]  # texts by which each part of its data is recognised
    wandb_id: str | None
    lr: float  # the schedule's rate at the last step
    frozen: FrozenFiles
    # the arguments of runs that this one needs, by the keys that hold their paths
    needed_runs: Mapping[str, str] = field(default_factory=dict)
    code: str = field(default_factory=revision.summary)
    threads: int = field(default_factory=torch.get_num_threads)
    torch: str = torch.__version__
    compile: bool = False  # what `auto` became
    device: str = "cpu"  # its kind

    def differences(self, meta: Mapping[str, Any]) -> list[str]:
        """Returns what to tell the user when this run continues a checkpoint: one line for each
        difference that can change results.
        """
        lines = []
        for what in ("threads", "torch", "compile", "device"):
            then, now = meta[what], getattr(self, what)
            if then != now:
                lines.append(
                    f"{what}: {short(then)} when the checkpoint was written, {short(now)} now; the"
                    " run goes on, with other rounding"
                )
        if meta["code"] not in ("", self.code):
            then = " ".join(meta["code"].split())
            lines.append(f"the code has changed since the checkpoint: {then} then")
        before, after = f"{meta['lr']:.6g}", f"{self.lr:.6g}"
        if before != after and meta["step"]:
            lines.append(
                f"the learning rate jumps at step {meta['step']} from {before} to {after}, because"
                " the run has another length now"
            )
        return lines


class RowRanges(Protocol):
    """Knows which rows of a tensor this rank holds: see `optim/sync/base.py`."""

    def row_range(self, name: str, shape: Sequence[int]) -> RowRange | None: ...


class RowsOfRank(Tensors):
    """The tensors of a saved group, each cut to this rank's rows. Lazy: reads a tensor when it is
    accessed.
    """

    def __init__(self, saved: Saved, row_ranges: RowRanges) -> None:
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
            at_once = max(1, BYTES_AT_ONCE * len(live) // max(1, live.nbytes))
            for start in range(0, len(live), at_once):
                block = live[start : start + at_once]
                block.copy_(saved.read(first + start, first + start + len(block)))

    def files(self) -> set[str]:
        """The files in which these rows lie."""
        return {
            piece.file.name
            for name, saved in self._saved.items()
            for piece in saved.holding(*self._range(name))
        }

    def _range(self, name: str) -> tuple[int, int]:
        shape = self._saved[name].shape
        rows = self._row_ranges.row_range(name, shape)
        return rows[:2] if rows else (0, shape[0] if shape else 1)


@dataclass(frozen=True)
class _Group(Generic[S]):
    state: Callable[[], S]
    load: Callable[[S], object]
    like: Like
    any_precision: bool
    otherwise: str = OTHERWISE

    def check(self, tensors: Tensors, step: int, what: str) -> None:
        check_alike(self.like(tensors, step), tensors, what, self.any_precision)


class Registry:
    """The groups of tensors that a run's checkpoints hold, its progress, and its origin."""

    def __init__(
        self, origin: Callable[[], Origin], row_ranges: RowRanges, owned: Iterable[int] = ()
    ) -> None:
        """`owned` are this rank's shards."""
        self.run_state, self.origin = RunState(), origin
        self._row_ranges, self.owned = row_ranges, list(owned)
        self._shared: dict[str, _Group[Tensors]] = {}
        self._by_shard: dict[str, _Group[ByShard]] = {}

    def add(
        self,
        name: str,
        state: Callable[[], Tensors],
        load: Callable[[Tensors], object],
        like: Like | None = None,
        any_precision: bool = False,
        otherwise: str = OTHERWISE,
    ) -> None:
        """Registers a group that all ranks share: equal on all, or split by rows.

        Args:
            name: the group's name in checkpoints.
            state: returns its live tensors.
            load: restores them; gets this rank's rows of a saved `state`.
            like: called with a checkpoint's tensors and step; returns the names, shapes and types
                that they must have. Default: those of `state` now.
            any_precision: whether floats of other types are accepted.
            otherwise: what the error tells the user to do if a checkpoint lacks this group.
        """
        own = like or (lambda saved, step: state())
        self._shared[name] = _Group(
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
        self._by_shard[name] = _Group(state, load, like, any_precision)

    @property
    def names(self) -> list[str]:
        """The groups that a checkpoint of this run holds."""
        return [*self._shared, *([SHARDS] if self._by_shard else [])]

    def snapshot(self) -> tuple[dict[str, dict[str, Tensor | Slice]], dict[str, Any]]:
        """Returns all that a run needs to continue bit by bit: groups of tensors for
        `Writer.save`, and values for JSON.
        """
        groups = {name: self._held(group.state()) for name, group in self._shared.items()}
        if self._by_shard:
            groups[SHARDS] = {
                f"{shard}/{name}/{key}": Slice.whole(tensor)
                for name, group in self._by_shard.items()
                for shard, tensors in group.state().items()
                for key, tensor in tensors.items()
            }
        return groups, asdict(self.run_state) | asdict(self.origin())

    def check(self, saved: Mapping[str, Saved], step: int) -> None:
        """Raises ConfigError unless every group can load a checkpoint. Reads no tensors yet."""
        for name in self.names:
            if name not in saved:
                fix = self._shared[name].otherwise if name in self._shared else OTHERWISE
                raise ConfigError(f"it holds no {name}; {fix}")
        for name, group in self._shared.items():
            group.check(_shapes(saved[name]), step, name)
        for shard, tensors in self._own_shards(saved).items():
            shapes = _shapes(tensors)
            for name, by_shard in self._by_shard.items():
                by_shard.check(_within(name, shapes), step, f"shard {shard}, {name}")
            for key in shapes:
                if key.partition("/")[0] not in self._by_shard:
                    raise ConfigError(
                        f"shard {shard}: it holds {key}, which this run has not; use the code that"
                        " wrote it"
                    )

    def files(self, saved: Mapping[str, Saved]) -> set[str]:
        """Returns the files of a checkpoint that `load` reads on this rank."""
        every = [RowsOfRank(saved[name], self._row_ranges).files() for name in self._shared]
        for tensors in self._own_shards(saved).values():
            every += [{piece.file.name for piece in stored.slices} for stored in tensors.values()]
        return set().union(*every)

    def load(self, saved: Mapping[str, Saved]) -> None:
        """Restores all groups from a checkpoint that `check` has accepted."""
        for name, group in self._shared.items():
            group.load(RowsOfRank(saved[name], self._row_ranges))
        read = {
            shard: {name: stored.read() for name, stored in tensors.items()}
            for shard, tensors in self._own_shards(saved).items()
        }
        for name, by_shard in self._by_shard.items():
            by_shard.load({shard: _within(name, tensors) for shard, tensors in read.items()})

    def _own_shards(self, saved: Mapping[str, Saved]) -> dict[int, dict[str, Stored]]:
        if not self._by_shard:
            return {}
        return {shard: _within(str(shard), saved[SHARDS]) for shard in self.owned}

    def _whole(self, tensors: Tensors) -> Tensors:
        """Gives tensors the shapes that they have in a checkpoint."""
        shapes = dict(tensors)
        for name, tensor in tensors.items():
            if rows := self._row_ranges.row_range(name, tensor.shape):
                shape = (rows.of, *tensor.shape[1:])
                shapes[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return shapes

    def _held(self, tensors: Tensors) -> dict[str, Tensor | Slice]:
        """Returns the tensors, or this rank's rows of them."""
        held: dict[str, Tensor | Slice] = {}
        for name, tensor in tensors.items():
            rows = self._row_ranges.row_range(name, tensor.shape)
            if rows is None or rows.of == 0:
                held[name] = _local(tensor)
            elif rows.stop > rows.first:
                held[name] = Slice(_local(tensor)[: rows.stop - rows.first], rows)
        return held


def check_alike(live: Tensors, saved: Tensors, what: str, any_precision: bool = False) -> None:
    """Raises ConfigError unless names, shapes and types are equal; with `any_precision`, types of
    floats may differ.
    """
    fix = "use the arch and data of the run that wrote it"
    for key in live:
        if key not in saved:
            raise ConfigError(f"{what}: {key} is missing from it; {fix}")
        there, here = tuple(saved[key].shape), tuple(live[key].shape)
        if there != here:
            raise ConfigError(f"{what}: {key} has shape {there} there and {here} here; {fix}")
        dtype_there, dtype_here = saved[key].dtype, live[key].dtype
        if dtype_there != dtype_here and not (
            any_precision and dtype_there.is_floating_point and dtype_here.is_floating_point
        ):
            raise ConfigError(
                f"{what}: {key} is of {dtype_there} there and of {dtype_here} here; {fix}"
            )
    for key in saved:
        if key not in live:
            raise ConfigError(
                f"{what}: it holds {key}, which this model has not; use the arch of the run that"
                " wrote it"
            )


def _local(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor as a plain tensor; other tensors as they are."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _shapes(saved: Saved) -> Tensors:
    return {name: stored.meta for name, stored in saved.items()}


def _within(name: str, tensors: Mapping[str, S]) -> dict[str, S]:
    """Returns what lies under a name, without that name in front."""
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}/")
    }


class Carries:
    """State that slots carry from step to step: by micro-batch in training, by shard when saved.

    Only the objective knows what a carry contains.
    """

    def __init__(self, shard_groups: Sequence[Sequence[int]], fresh: Callable[[], Any]) -> None:
        """`shard_groups` are this rank's shards, one group for each micro-batch.

        `fresh` makes the initial carry of one shard, which restored carries must match.
        """
        self._shard_groups = shard_groups
        self._fresh = functools.cache(
            lambda: {name: tensor.to("meta") for name, tensor in flatten(fresh()).items()}
        )
        self._carries: list[Any] = [None] * len(shard_groups)
        # what a checkpoint held, until the first step asks for it
        self._saved: ByShard = {}

    def get(self, number: int, fresh: Callable[[], Any]) -> Any:
        """Returns the carry of a micro-batch, by its number; `fresh` makes its first one."""
        if self._carries[number] is not None:
            return self._carries[number]
        carry, shards = fresh(), self._shard_groups[number]
        saved = [self._saved[shard] for shard in shards if self._saved.get(shard)]
        if len(saved) < len(shards):
            return carry
        joined = {name: torch.cat([shard[name] for shard in saved]) for name in saved[0]}
        return map_tensors(lambda name, old: joined[name].to(old.device, old.dtype), carry)

    def put(self, carries: Iterable[Any]) -> None:
        """Stores the carries after a step; None makes a micro-batch begin with a fresh one."""
        self._carries, self._saved = list(carries), {}

    def state(self) -> dict[int, Tensors]:
        """Returns every shard's carry for a checkpoint; before the first step, the restored one."""
        by_shard = {
            shard: self._saved.get(shard, {}) for group in self._shard_groups for shard in group
        }
        for shards, carry in zip(self._shard_groups, self._carries, strict=True):
            if carry is not None:
                count = len(shards)
                cut = {
                    name: tensor.unflatten(0, (count, len(tensor) // count))
                    for name, tensor in flatten(carry).items()
                }
                for number, shard in enumerate(shards):
                    by_shard[shard] = {name: tensor[number] for name, tensor in cut.items()}
        return by_shard

    def like(self, saved: Tensors, step: int) -> Tensors:
        """Returns the shapes that a shard's saved carry must have: those of a fresh carry, or none
        if nothing was saved.
        """
        return self._fresh() if saved else {}

    def load(self, saved: ByShard) -> None:
        """Restores saved carries, however they were grouped into micro-batches."""
        self._carries, self._saved = [None] * len(self._shard_groups), saved


def flatten(value: Any) -> dict[str, Tensor]:
    """Every tensor in dataclasses, dicts, tuples and lists, named by its path: `state/0`,
    `batch/inputs`.
    """
    tensors: dict[str, Tensor] = {}
    map_tensors(tensors.setdefault, value)
    return tensors


def map_tensors(function: Callable[[str, Tensor], Tensor], value: Any, name: str = "") -> Any:
    """Applies a function to the path and content of every tensor; returns the same structure."""

    def below(key: object, child: Any) -> Any:
        return map_tensors(function, child, f"{name}/{key}" if name else str(key))

    if value is None:
        return None
    if isinstance(value, Tensor):
        return function(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return dataclasses.replace(value, **{key: below(key, getattr(value, key)) for key in names})
    if isinstance(value, Mapping):
        return {key: below(key, child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        items = [below(index, child) for index, child in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise TypeError(
        f"{name or 'the value'} is of type {type(value).__name__}; state is made of tensors, None,"
        " dataclasses, dicts, tuples and lists"
    )
