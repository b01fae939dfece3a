"""What a run saves. Each group of tensors is registered by name; the checkpoint code knows no
names.

A checkpoint holds whole tensors. On its way out, rank 0 gets each whole: `Registry.snapshot`. On
its way in, rank 0 broadcasts each, and every rank keeps its share: `from_rank_0`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from utils.checkpoint.foreign import layout_of
from utils.checkpoint.format import OneByOne, Stored, Unreadable
from utils.errors import ConfigError, brief
from utils.ranks.distributed import Dist
from utils.transfer import local

Tensors = Mapping[str, Tensor]
SHARDS = "shards"  # the group of all that belongs to shards: `3/carry/state`
EVALUATED = "the evaluation set "  # and its name: a part of the data
OTHERWISE = "use a checkpoint of this command"


class Split(Protocol):
    """Knows which tensors are split over ranks: see `optim/sync/base.py`."""

    dist: Dist

    def whole(self, name: str, share: Tensor) -> tuple[Tensor, int]: ...

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size: ...

    def share_of(self, name: str, whole: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Group:
    state: Callable[[], Any]
    load: Callable[[Any], object]
    expected: Callable[[Tensors, int], Tensors]
    any_precision: bool
    otherwise: str = OTHERWISE

    def check(self, tensors: Tensors, step: int, what: str) -> None:
        check_alike(self.expected(tensors, step), tensors, what, self.any_precision)


class Registry:
    """The groups of tensors that a run's checkpoints hold, and what meta.json tells of the run."""

    def __init__(self, origin: Mapping[str, Any], split: Split, owned: Iterable[int] = ()) -> None:
        """`origin` is what stays the same while it trains; `owned` are this rank's shards."""
        self.origin, self.split = origin, split
        self._owned = [str(shard) for shard in owned]
        self._shared: dict[str, _Group] = {}
        self._by_shard: dict[str, _Group] = {}

    def add(
        self,
        name: str,
        state: Callable[[], Tensors],
        load: Callable[[Tensors], object],
        expected: Callable[[Tensors, int], Tensors] | None = None,
        any_precision: bool = False,
        otherwise: str = OTHERWISE,
    ) -> None:
        """Registers a group that all ranks share: equal on all, or split by rows.

        Args:
            name: the group's name in checkpoints.
            state: returns its live tensors, of the same names on all ranks.
            load: restores them; gets this rank's share of a saved `state`, one by one.
            expected: called with a checkpoint's tensors and step; returns the names, shapes and
                types that they must have. Default: those of `state` now.
            any_precision: whether floats of other types are accepted.
            otherwise: what the error tells the user to do if a checkpoint lacks this group.
        """
        own = expected or (lambda saved, step: state())
        self._shared[name] = _Group(
            state, load, lambda saved, step: self._whole(own(saved, step)), any_precision, otherwise
        )

    def add_by_shard(
        self,
        name: str,
        state: Callable[[], Mapping[int, Tensors]],
        load: Callable[[Mapping[int, Tensors]], object],
        expected: Callable[[Tensors, int], Tensors],
        any_precision: bool = False,
    ) -> None:
        """Registers state that belongs to shards; each rank has that of its shards.

        `state` returns it by shard, `load` gets it by shard, and `expected` is called for each
        shard.
        """
        self._by_shard[name] = _Group(state, load, expected, any_precision)

    @property
    def names(self) -> list[str]:
        """The groups that a checkpoint of this run holds."""
        return [*self._shared, *([SHARDS] if self._by_shard else [])]

    def snapshot(self, progress: Mapping[str, Any]) -> tuple[dict[str, OneByOne], dict[str, Any]]:
        """Returns all that a run needs to continue bit by bit: groups of tensors, each of which
        comes whole to rank 0, and values for JSON, with those of its `progress`.
        """
        groups = {name: self._gathered(group.state()) for name, group in self._shared.items()}
        if self._by_shard:
            groups[SHARDS] = self._of_all_shards()
        return groups, {**self.origin, **progress}

    def check(self, saved: Mapping[str, Tensors], step: int) -> None:
        """Raises ConfigError unless every group can load a checkpoint, given without content."""
        for name in self.names:
            if name not in saved:
                fix = self._shared[name].otherwise if name in self._shared else OTHERWISE
                raise ConfigError(f"it holds no {name}; {fix}")
        for name, group in self._shared.items():
            group.check(saved[name], step, name)
        for shard in self._owned if self._by_shard else ():
            shapes = _within(shard, saved[SHARDS])
            for name, by_shard in self._by_shard.items():
                by_shard.check(_within(name, shapes), step, f"shard {shard}, {name}")
            for key in shapes:
                if key.partition("/")[0] not in self._by_shard:
                    raise ConfigError(
                        f"shard {shard}: it holds {key}, which this run does not have; use the code"
                        " that wrote it"
                    )

    def load(self, saved: Mapping[str, OneByOne]) -> None:
        """Restores all groups from a checkpoint that `check` has accepted."""
        for name, group in self._shared.items():
            group.load(saved[name])
        own: dict[str, dict[str, Tensor]] = {shard: {} for shard in self._owned}
        for key, tensor in saved[SHARDS].items() if self._by_shard else ():
            shard, _, name = key.partition("/")
            if shard in own:
                own[shard][name] = tensor
        for name, by_shard in self._by_shard.items():
            by_shard.load({int(shard): _within(name, tensors) for shard, tensors in own.items()})

    def _gathered(self, held: Tensors) -> OneByOne:
        """The tensors that all ranks share, whole."""
        whole = self.split.whole
        return OneByOne(self._whole(held), lambda name: whole(name, local(held[name]))[0])

    def _of_all_shards(self) -> OneByOne:
        """The tensors of all shards, each sent to rank 0 by the rank that has it."""
        dist, shapes, owners = self.split.dist, dict[str, Tensor](), dict[str, int]()
        own = {
            f"{shard}/{name}/{key}": tensor.detach()
            for name, group in self._by_shard.items()
            for shard, tensors in group.state().items()
            for key, tensor in tensors.items()
        }
        for rank, text in enumerate(dist.all_gather_text(described(own))):
            of_rank = from_description(text)
            shapes |= of_rank
            owners |= dict.fromkeys(of_rank, rank)
        return OneByOne(
            shapes, lambda name: dist.to_main(owners[name], own.get(name, shapes[name]))
        )

    def _whole(self, tensors: Tensors) -> Tensors:
        """Gives tensors, without their content, the shapes that they have in a checkpoint."""
        shape = self.split.whole_shape
        return {
            name: torch.empty(shape(name, tensor.shape), dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
        }


def from_rank_0(shapes: Tensors, stored: Mapping[str, Stored], split: Split) -> OneByOne:
    """Returns a saved group, of which each rank gets its share. Rank 0 alone has it `stored`, and
    broadcasts one tensor after another. All raise Unreadable if rank 0 cannot read one.
    """
    dist = split.dist

    def bring(name: str) -> Tensor:
        content = torch.zeros(shapes[name].nbytes + 1, dtype=torch.uint8)
        failure = Unreadable(Path(name), "rank 0 cannot read it")
        if dist.is_main:
            try:
                stored[name].read_into(content[:-1].numpy().data)
                content[-1] = 1  # tells the other ranks that the rest is to be used
            except Unreadable as error:
                failure = error
            except OSError as error:  # a run that goes on has just deleted it
                failure = Unreadable(stored[name].file, brief(error))
        message = content.to(dist.device)
        dist.broadcast(message)
        content = message.cpu()
        if not content[-1]:
            raise failure
        whole = content[:-1].view(shapes[name].dtype).view(shapes[name].shape)
        share = split.share_of(name, whole)
        return share if share is whole else share.clone()  # which lets go of the other rows

    return OneByOne(shapes, bring)


def described(tensors: Tensors) -> str:
    """Types and shapes as text, for other ranks."""
    return json.dumps(
        {
            name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
            for name, tensor in tensors.items()
        }
    )


def from_description(text: str) -> dict[str, Tensor]:
    """Returns tensors of these types and shapes, without content."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, *shape) in json.loads(text).items()
    }


def check_alike(live: Tensors, saved: Tensors, what: str, any_precision: bool = False) -> None:
    """Raises ConfigError unless names, shapes and types are equal; with `any_precision`, types of
    floats may differ.
    """
    layout = layout_of(saved)
    fix = "use the arch and data of the run that wrote it" + (
        layout and f"; it looks like {layout}"
    )
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
            raise ConfigError(f"{what}: it holds {key}, which this model does not have; {fix}")


def _within(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Returns what lies under a name, without that name in front."""
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}/")
    }
