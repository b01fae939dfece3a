"""The groups of tensors that a run saves. Their names are given by the caller.

A checkpoint holds whole tensors. On the way out, rank 0 gets each whole. On the way in, rank 0
broadcasts each, and every rank keeps its share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.foreign import layout_of
from utils.checkpoint.format import Stored, Unreadable
from utils.errors import ConfigError, brief
from utils.ranks.distributed import Dist
from utils.ranks.one_by_one import OneByOne

SHARDS = "shards"  # the group of all that belongs to shards: `3/carry/state`
EVALUATED = "the evaluation set "  # and its name: a part of the data
OTHERWISE = "use a checkpoint of this command"


@dataclass(frozen=True)
class Group:
    """How a group of tensors is saved, checked and restored. State that belongs to shards comes and
    goes by shard, and is checked shard by shard.
    """

    state: Callable[[], Any]  # returns the live tensors, of shards by shard
    load: Callable[[Any], object]  # restores them, from this rank's share of what `state` returned
    # called with a checkpoint's tensors and step, returns the names, shapes and types that they
    # must have; None: those of `state` now. Shards need it.
    expected: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] | None = None
    any_precision: bool = False  # whether floats of other types are accepted
    otherwise: str = OTHERWISE  # tells the user what to do with a checkpoint that has no such group


@dataclass
class Registry:
    """All that a run's checkpoints hold."""

    origin: Mapping[str, Any]  # what meta.json tells of the run, and no step changes
    dist: Dist
    owned: Iterable[int]  # this rank's shards
    shared: Mapping[str, Group]  # what all ranks share: equal on all, or split by rows
    by_shard: Mapping[str, Group]  # what belongs to shards
    # how a sync splits rows over ranks
    gathered: Callable[[Mapping[str, Tensor]], OneByOne]
    share_of: Callable[[str, Tensor], Tensor]

    @property
    def names(self) -> list[str]:
        """The groups that a checkpoint of this run holds."""
        return [*self.shared, *([SHARDS] if self.by_shard else [])]

    def snapshot(self, progress: Mapping[str, Any]) -> tuple[dict[str, OneByOne], dict[str, Any]]:
        """Returns all that a run needs to continue bit by bit: groups of tensors, each of which
        comes whole to rank 0, and values for JSON, with those of its `progress`.
        """
        groups = {name: self.gathered(group.state()) for name, group in self.shared.items()}
        if self.by_shard:
            groups[SHARDS] = self._of_all_shards()
        return groups, {**self.origin, **progress}

    def check(self, saved: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Raises ConfigError unless every group can load a checkpoint, given without content."""
        for name in self.names:
            if name not in saved:
                fix = self.shared[name].otherwise if name in self.shared else OTHERWISE
                raise ConfigError(f"it holds no {name}; {fix}")
        for name, group in self.shared.items():
            there = saved[name]
            live = (
                group.expected(there, step)
                if group.expected
                else self.gathered(group.state()).shapes
            )
            check_alike(live, there, name, group.any_precision)
        for shard in self.owned if self.by_shard else ():
            there = _within(str(shard), saved[SHARDS])
            for name, group in self.by_shard.items():
                tensors, what = _within(name, there), f"shard {shard}, {name}"
                assert group.expected, name
                check_alike(group.expected(tensors, step), tensors, what, group.any_precision)
            for key in there:
                if key.partition("/")[0] not in self.by_shard:
                    raise ConfigError(
                        f"shard {shard}: it holds {key}, which this run does not have; use the code"
                        " that wrote it"
                    )

    def load(
        self,
        shapes: Mapping[str, Mapping[str, Tensor]],
        stored: Mapping[str, Mapping[str, Stored]],
    ) -> None:
        """Restores all groups from a checkpoint that `check` has accepted. Rank 0 alone has it
        `stored`. All raise Unreadable if rank 0 cannot read a tensor.
        """
        saved = {name: self._from_rank_0(shapes[name], stored.get(name, {})) for name in self.names}
        for name, group in self.shared.items():
            group.load(saved[name])
        own: dict[str, dict[str, Tensor]] = {str(shard): {} for shard in self.owned}
        for key, tensor in saved[SHARDS].items() if self.by_shard else ():
            shard, _, name = key.partition("/")
            if shard in own:
                own[shard][name] = tensor
        for name, group in self.by_shard.items():
            group.load({int(shard): _within(name, tensors) for shard, tensors in own.items()})

    def _of_all_shards(self) -> OneByOne:
        """The tensors of all shards, each sent to rank 0 by the rank that has it."""
        shapes, owners = dict[str, Tensor](), dict[str, int]()
        own = {
            f"{shard}/{name}/{key}": tensor.detach()
            for name, group in self.by_shard.items()
            for shard, tensors in group.state().items()
            for key, tensor in tensors.items()
        }
        for rank, text in enumerate(self.dist.all_gather_text(described(own))):
            of_rank = from_description(text)
            shapes |= of_rank
            owners |= dict.fromkeys(of_rank, rank)
        return OneByOne(
            shapes, lambda name: self.dist.to_main(owners[name], own.get(name, shapes[name]))
        )

    def _from_rank_0(self, shapes: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> OneByOne:
        """This rank's share of tensors that rank 0 reads, and broadcasts one after another."""

        def bring(name: str) -> Tensor:
            content = torch.zeros(shapes[name].nbytes + 1, dtype=torch.uint8)
            failure = Unreadable(Path(name), "rank 0 cannot read it")
            if self.dist.is_main:
                try:
                    stored[name].read_into(content[:-1].numpy().data)
                    content[-1] = 1  # tells the other ranks that the rest is to be used
                except Unreadable as error:
                    failure = error
                except OSError as error:  # a run that goes on has just deleted it
                    failure = Unreadable(stored[name].file, brief(error))
            message = content.to(self.dist.device)
            self.dist.broadcast(message)
            content = message.cpu()
            if not content[-1]:
                raise failure
            whole = content[:-1].view(shapes[name].dtype).view(shapes[name].shape)
            share = self.share_of(name, whole)
            return share if share is whole else share.clone()  # which lets go of the other rows

        return OneByOne(shapes, bring)


def described(tensors: Mapping[str, Tensor]) -> str:
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


def check_alike(
    live: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str, any_precision: bool = False
) -> None:
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


def _within(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what lies under a name, without that name in front."""
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}/")
    }
