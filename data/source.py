"""The contract between data and everything else: batches as pure functions of (step, shard)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from data.files import content_hash
from utils.checkpoint.registry import EVALUATED, Registry
from utils.command.instantiate import make
from utils.errors import ConfigError, full_name, kind_of
from utils.measure.evaluator import Batch, Evaluator
from utils.noise import seeded
from utils.spec import IGNORE, Spec

__all__ = [
    "IGNORE", "Arrays", "Batch", "EvalSet", "Examples", "RunLength", "RunSettings", "Source",
    "Spec",
]  # fmt: skip

Arrays = dict[str, np.ndarray]
KNOWN_ROWS = 8  # of each evaluation set, by which a run recognises it, with its length


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The keys of a run that every source may need, under the names that users know.

    A source gets them as its first argument, and the keys of `data` as keyword arguments.
    """

    seed: int = 0
    shards: int = 8
    global_batch_size: int = 0  # 0: not given, which only data made of tokens allows
    tokens_per_update: int | None = None
    epochs: int | None = None
    eval_interval: int | None = None  # in epochs
    max_tokens: int | None = None
    max_steps: int | None = None
    eval_every_steps: int | None = None
    eval_only: bool = False
    num_workers: int = 0  # processes that call `train_batch`; 0: the training process does
    data_path: str | None = None

    @classmethod
    def of(cls, config: Mapping[Any, Any]) -> RunSettings:
        """Picks them from a run's configuration; keys that are missing or null get the default."""
        given = {field.name: config.get(field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


class EvalSet(Protocol):
    """A finite set of examples, each read by its index."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Arrays:
        """Returns these examples, one row each."""
        ...

    def padding(self, rows: int) -> Arrays:
        """Returns rows that count in no metric, to fill a last batch."""
        ...


class Examples:
    """An evaluation set of arrays that have a row for each example, by name; or of a map-style
    dataset whose items are dictionaries, such as PyTorch's. Sets that are scored need `labels`.
    """

    def __init__(self, examples: Arrays | Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        some = self._examples
        return len(next(iter(some.values()))) if isinstance(some, dict) else len(some)

    def read(self, indices: np.ndarray) -> Arrays:
        if isinstance(self._examples, dict):
            return {name: array[indices] for name, array in self._examples.items()}
        rows = [self._examples[index] for index in indices.tolist()]
        where = f"{full_name(self._examples)}.__getitem__"
        if not isinstance(rows[0], Mapping):
            raise ConfigError(
                f"{where}: returns {kind_of(rows[0])}; return a dict by name, such as inputs and"
                " labels"
            )
        return {name: _stacked(where, name, [row[name] for row in rows]) for name in rows[0]}

    def padding(self, rows: int) -> Arrays:
        """Repeats the first example, so that all batches take as long, without its labels."""
        batch = self.read(np.zeros(rows, np.int64))
        return {
            name: np.full_like(array, IGNORE) if name == "labels" else array
            for name, array in batch.items()
        }


def _stacked(where: str, name: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.stack([np.asarray(value) for value in values])
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: {name} has another shape in some examples than in others; pad it to one"
        ) from None


@dataclass(frozen=True)
class RunLength:
    """How many steps a run takes, and when it is evaluated."""

    total_steps: int
    examples_per_update: int
    # an average, as epochs of puzzles with several examples differ in length; None: no epochs
    steps_per_epoch: float | None = None
    eval_every_steps: int | None = None
    # whether epochs that end after so many steps are followed by an evaluation
    ends_iteration: Callable[[int], bool] | None = None

    @classmethod
    def in_steps(cls, run: RunSettings) -> RunLength:
        """Returns the length of a run on data without epochs: `max_steps` alone sets it."""
        refuse_epochs(run)
        if run.max_steps is None:
            raise ConfigError(
                "max_steps=null: this data has no epochs; say how many steps to train"
            )
        return cls(run.max_steps, run.global_batch_size, None, run.eval_every_steps)

    def evaluates_after(self, done: int) -> bool:
        """Returns whether to evaluate when this many steps are done; True after the last one."""
        every = self.eval_every_steps
        return (
            done == self.total_steps
            or (every is not None and done > 0 and done % every == 0)
            or (self.ends_iteration is not None and self.ends_iteration(done))
        )


class Source(Protocol):
    """The data of a run: inherit it, and define `spec`, `length` and `train_batch`.

    Every rank makes its own, from the `RunSettings` and the keys of its yaml file.
    """

    spec: Spec

    @cached_property
    def length(self) -> RunLength:
        """How long the run is. Read on all ranks at the same time, as counting may take seconds."""
        raise NotImplementedError

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step; steps count from 0.

        A function of the seed, the step and the shard alone (`register_state` has the exception).
        Called on the rank that owns the shard, in a worker process if the run has any.
        """
        ...

    def eval_sets(self) -> Mapping[str, EvalSet]:
        """Returns the sets that an evaluation goes through, by name. Default: none."""
        return {}

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        """Returns fresh evaluators for one evaluation of a set: votes, answers as text, pictures.

        Default: none, only the means of the objective's metrics.
        """
        return ()

    def register_state(self, saved: Registry) -> None:
        """Registers state that checkpoints must hold, for data that can only be read forwards.

        Such a stream is the one exception to the rule that a batch depends on the seed, the step
        and the shard alone: it also depends on how far the shard has been read. So the source keeps
        a cursor for each shard, registers it by `saved.add_by_shard`, and is asked for each shard's
        steps in order, from the step of the restored cursor on. Before that, it may be asked for
        the first steps to see what a batch looks like, also of another rank's shard, which must not
        move the cursor. Cursors belong to shards, so the batches are the same at any number of
        ranks; a rank returns those of `saved.owned`.

        Called once, before a checkpoint is restored and before worker processes start. Default:
        registers nothing.
        """
        return None


def refuse_epochs(run: RunSettings) -> None:
    """Raises ConfigError if a run on data without epochs is given some."""
    for key, value in (("epochs", run.epochs), ("eval_interval", run.eval_interval)):
        if value is not None:
            raise ConfigError(
                f"{key}={value}: this data has no epochs; use max_steps and eval_every_steps"
            )


def refuse_path(run: RunSettings) -> None:
    """Raises ConfigError if a run on data that is drawn is given a folder."""
    if run.data_path is not None:
        raise ConfigError(
            f"data_path={run.data_path}: this data is drawn anew, not read; leave data_path out"
        )


def combined_fingerprint(fingerprints: Sequence[str]) -> str:
    """Returns one fingerprint for several corpora or datasets; a single one keeps its own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def known_parts(source: Source, shard: int | None) -> dict[str, str]:
    """Returns texts by which a run recognises its data, one for each part: a hash of the first
    step's first shard, and the length of each evaluation set with a hash of its first rows.

    They must be the same on all ranks, and after a resume. `shard` is one of this rank's; None for
    a run that does not train.
    """
    parts = {"the dataset": source.spec.fingerprint}
    if shard is not None:
        # only its owner may begin to read a stream
        is_stream = type(source).register_state is not Source.register_state
        batch = check_batch(
            f"{full_name(source)}.train_batch", source.train_batch(0, shard if is_stream else 0)
        )
        if not is_stream:
            parts["the first training batch"] = content_hash(batch)
    for number, (name, examples) in enumerate(source.eval_sets().items()):
        where, rows = f"{full_name(source)}.eval_sets: {name}", dict[str, np.ndarray]()
        if not hasattr(examples, "read"):
            raise ConfigError(f"{where}: is {kind_of(examples)}; give Examples of data.source")
        if count := min(KNOWN_ROWS, len(examples)):
            rows = check_batch(where, examples.read(np.arange(count)), count)
        parts[EVALUATED + name] = f"{number} {len(examples)} {content_hash(rows)}"
    return parts


def check_batch(where: str, batch: Any, rows: int | None = None) -> Arrays:
    """Returns a batch as arrays. Raises ConfigError unless it is a dictionary of numbers, with one
    row for each example.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(
            f"{where}: returns {kind_of(batch)}; return a dict of arrays, such as inputs and labels"
        )
    arrays: Arrays = {}
    for name, value in batch.items():
        try:
            arrays[name] = array = np.asarray(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{where}: {name} makes no array; return numbers, in rows padded to one length"
            ) from None
        if array.dtype.kind not in "biufc":
            what = array.dtype.type.__name__.strip("_")
            raise ConfigError(
                f"{where}: {name} holds {what}, not numbers; encode it, or leave it out"
            )
        if not array.ndim:
            raise ConfigError(f"{where}: {name} is one number; give every example a row of its own")
        rows = len(array) if rows is None else rows
        if len(array) != rows:
            raise ConfigError(
                f"{where}: {name} has {len(array)} rows, not {rows}; give every example one row"
            )
    return arrays


def source_of(config: Mapping[Any, Any]) -> Source:
    """Makes the source of a run with this configuration."""
    run = RunSettings.of(config)
    with seeded(run.seed):  # a split that somebody else's function draws
        source: Source = make(config.get("data", {}), "data", run)
    return source
