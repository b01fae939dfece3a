"""What a run saves: every part enters itself by a name, and the checkpoint code knows none of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from utils import revision
from utils.errors import ConfigError

Tensors = Mapping[str, Tensor]
ByShard = Mapping[int, Tensors]
Like = Callable[[Tensors, int], Tensors]
# parts that are loaded from files of their own: `path` and `sha256` of each
FrozenFiles = Mapping[str, Mapping[str, str]]
S = TypeVar("S")


@dataclass
class Standing:
    """Where a run stands."""

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
    """What has written a checkpoint."""

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
        """What to tell the user of a checkpoint that goes on here; of the step that it has."""
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


class Whole(Protocol):
    """Between what ranks hold, which may be their shares of tensors, and what a checkpoint holds:
    see `optim/sync/base.py`.
    """

    def full(self, tensors: Tensors) -> Tensors: ...
    def like(self, tensors: Tensors) -> Tensors: ...
    def split(self, tensors: Tensors, part: str) -> Tensors: ...


class Registry:
    """The parts of a run that checkpoints hold, where it stands, and what writes it."""

    def __init__(self, origin: Callable[[], Origin], whole: Whole) -> None:
        self.standing, self.origin = Standing(), origin
        self._whole = whole
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
        own, whole = like or (lambda saved, step: state()), self._whole
        self._shared[name] = _Part(
            lambda: whole.full(state()),
            lambda saved: load(whole.split(saved, name)),
            lambda saved, step: whole.like(own(saved, step)),
            any_precision,
            otherwise,
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

    def snapshot(self) -> tuple[dict[str, Tensors], dict[int, dict[str, Tensor]], dict[str, Any]]:
        """All that makes a run go on as if nothing had happened: what ranks share, what this rank's
        shards have, and what is JSON.
        """
        shards: dict[int, dict[str, Tensor]] = {}
        for name, part in self._by_shard.items():
            for shard, tensors in part.state().items():
                shards.setdefault(shard, {}).update(
                    {f"{name}/{key}": tensor for key, tensor in tensors.items()}
                )
        groups = {name: part.state() for name, part in self._shared.items()}
        return groups, shards, asdict(self.standing) | asdict(self.origin())

    def check(self, groups: Mapping[str, Tensors], shards: ByShard, step: int) -> None:
        """A ConfigError unless every part can take its share of a checkpoint; nothing is taken
        yet.
        """
        for name, part in self._shared.items():
            if name not in groups:
                raise ConfigError(f"it holds no {name}; {part.otherwise}")
            part.check(groups[name], step, name)
        for shard, tensors in shards.items():
            for name, owned in self._by_shard.items():
                owned.check(_within(name, tensors), step, f"shard {shard}, {name}")
            for key in tensors:
                if key.partition("/")[0] not in self._by_shard:
                    raise ConfigError(
                        f"shard {shard}: it holds {key}, which this run has not; use the code that"
                        " wrote it"
                    )

    def load(self, groups: Mapping[str, Tensors], shards: ByShard) -> None:
        """Go on from what has been checked."""
        for name, part in self._shared.items():
            part.load(groups[name])
        for name, owned in self._by_shard.items():
            owned.load({shard: _within(name, tensors) for shard, tensors in shards.items()})


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
