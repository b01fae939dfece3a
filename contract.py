"""All that your code implements for a run, and all that it receives from one.

A line of research has a `Source` of data, a net, which is any `nn.Module`, and an `Objective`, the
net with its loss. A yaml file names each by `_target_`, beside its keys, and the run calls

    YourSource(run, **keys of data)          run: the `RunSettings`
    YourNet(spec, **keys of arch)            spec: the source's `Spec`
    YourObjective(net, **keys of arch.loss)

    source.train_batch(step, shard)          rows, as NumPy arrays by name
    objective(batch, carry, context)         a `StepOut`: the SUM of the loss, its weight, metrics
    objective.predict(batch)                 a `Prediction`, in evaluations

and does all else: ranks, gradients, optimizers, checkpoints, logs. In return a batch depends on the
seed, the step and the shard alone, and so do random numbers, which come from `Context.noise`
(`Noise` and `Dropout` are in utils/noise.py).

A small line needs `Source`, `Spec`, `RunLength`, `Examples`, `Objective`, `StepOut`, `Prediction`
and `IGNORE`. data/README.md has a complete source, models/README.md a net with its yaml files and a
recipe, and docs/your-own-code.md says how a run checks them.
"""

# In the names of shapes: B examples of a batch

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.errors import ConfigError, full_name, kind_of
from utils.noise import Dropout, Noise
from utils.ranks.distributed import Dist

# Rows as a source gives them, by name; the first dimension is the example. Names are yours, but for
# `labels`, and names that begin so, in which rows of padding are IGNORE. Types stay as they are:
# give float32, where NumPy makes float64; labels are integers of any size.
Arrays = dict[str, np.ndarray]
Batch = dict[str, Tensor]  # the same as an objective gets them
MetricSums = Mapping[str, tuple[Tensor, Tensor]]  # by name (sum, count), of which a run logs means
Carry = Any  # a dataclass, dict or tuple of tensors whose first dimension is the example
IGNORE = -100  # label of all that counts in no loss and no metric: cells, tokens, padding rows


# ---- data ----


class EvalSet(Protocol):
    """A finite set of examples, each read by its index. `Examples` is one."""

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
            name: np.full_like(array, IGNORE) if name.startswith("labels") else array
            for name, array in batch.items()
        }


def _stacked(where: str, name: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.stack([np.asarray(value) for value in values])
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: {name} has another shape in some examples than in others; pad it to one"
        ) from None


class Source(Protocol):
    """The data of a run: inherit it, and define `spec`, `length` and `train_batch`.

    Every rank makes its own, from the `RunSettings` and the keys of its yaml file.
    """

    spec: Spec

    @cached_property
    def length(self) -> RunLength:
        """How long the run is. Read on all ranks at the same time, as counting may take seconds."""
        raise NotImplementedError(f"{full_name(self)}: define length, as RunLength.in_steps(run)")

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step; steps count from 0.

        A function of the seed, the step and the shard alone (`cursor` has the exception). Called on
        the rank that owns the shard, in a worker process if the run has any.
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

    remark: str = ""  # a line for the log at the start, such as what makes reading slow

    # Only for data that can be read forwards alone, such as a stream of texts. It is the one
    # exception to the rule that a batch depends on the seed, the step and the shard alone: it also
    # depends on how far the shard has been read, which checkpoints hold for each shard. So batches
    # are the same at any number of ranks. The source is asked for each shard's steps in order, from
    # the step of its cursor on. Before that, it may be asked for step 0 to see what a batch looks
    # like, also of another rank's shard, which must not move the cursor.

    cursor: Sequence[str] = ()  # names of the numbers that say how far a shard has been read

    def cursors(self, step: int, shards: Sequence[int]) -> Mapping[int, Mapping[str, int]]:
        """Returns the cursor of each of these shards when this many steps are done."""
        return {}

    def go_on(self, cursors: Mapping[int, Mapping[str, int]]) -> None:
        """Goes on from these cursors, which are this rank's: called once, before training."""
        return None


# ---- nets and losses ----


@dataclass(frozen=True)
class Context:
    """All that a step may depend on besides its batch and carry."""

    progress: float  # the share of the run's steps that is done
    noise: Noise  # random numbers of this step, for the shards of this batch
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # sums of what `statistics` returned


@dataclass(frozen=True)
class StepOut:
    """One micro-batch's part of a step."""

    loss: Tensor  # the SUM over the local examples, with gradients
    weight: Tensor  # gradients are divided by its sum over micro-batches and ranks
    metrics: MetricSums
    carry: Carry = None  # for the next step, without gradients


@dataclass(frozen=True)
class Prediction:
    """The result of an objective on one evaluation batch."""

    metrics: MetricSums
    outputs: dict[str, Tensor] = field(default_factory=dict)  # one row per example; may be empty


@dataclass(frozen=True)
class Metric:
    """The metric that chooses the best checkpoint. As text, `-loss` means that lower is better."""

    name: str
    lower_is_better: bool = False

    @classmethod
    def parse(cls, text: str) -> Metric:
        return cls(text.removeprefix("-"), text.startswith("-"))

    def __str__(self) -> str:
        return f"-{self.name}" if self.lower_is_better else self.name

    def improves(self, results: Mapping[str, float], best: float | None) -> bool:
        """Whether a result beats the best so far; a missing one or NaN never does."""
        value = results.get(self.name, math.nan)
        if math.isnan(value):
            return False
        return best is None or (value < best if self.lower_is_better else value > best)


class Objective(nn.Module):
    """Wraps a net as `self.model` and says what to minimise: define `forward` and `predict`."""

    model: Any
    headline = Metric("accuracy")  # the metric a run is judged by, unless objective_metric is given
    costs: frozenset[str] = frozenset()  # names of other metrics where lower is better

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._dropouts = []
        # a layer's name is its stream of random numbers: the same on every rank and after a resume
        for name, layer in model.named_modules():
            if isinstance(layer, Dropout):
                layer.stream = name
                self._dropouts.append(layer)
        self.register_forward_pre_hook(_give_noise)

    def draw_from(self, noise: Noise) -> None:
        """Gives the dropout layers of the net the noise of their next pass."""
        for layer in self._dropouts:
            layer.noise = noise

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        """Returns the loss of a micro-batch as a sum, its weight, metrics and the next carry.

        Called on each rank for each micro-batch of a step, in training mode and with gradients.
        `batch` holds whole shards of this rank, on its device; random numbers come from
        `ctx.noise` alone. Nothing here may talk to other ranks.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> Prediction:
        """Returns metrics as (sum, count) and outputs with one row for each example.

        Called on each rank for its batches of an evaluation, in evaluation mode and without
        gradients. Any loop over the net is in here. Rows that pad a batch have labels to ignore and
        must not count.
        """
        raise NotImplementedError

    # All other methods are optional: override what the objective needs.

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the net computes: its `dtype`, by default that of its weights."""
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return getattr(self.model, "dtype", None) or next(weights, torch.float32)

    def call_net(self, *inputs: Tensor) -> Tensor:
        """Calls the net with its weights cast to `dtype`: layers of PyTorch need no care for it."""
        dtype = self.dtype
        if all(weight.dtype == dtype for weight in self.model.parameters()):
            return self.model(*inputs)
        # cast in each call, so that gradients reach the original weights, which optimizers update
        weights = {name: weight.to(dtype) for name, weight in self.model.named_parameters()}
        return functional_call(self.model, weights, inputs)

    def prepare(self, dist: Dist, source: Source, noise: Noise) -> None:
        """Prepares the net for its first step, from the data or by a warm-up.

        Called once, on all ranks together, when a new run begins: neither after a resume nor for an
        evaluation. `source` is the run's data, `noise` that of this rank's shards at step 0.

        It may only change, in place, parameters and buffers that checkpoints hold, and must leave
        the same bits on every rank: what depends on a rank's shards is summed over `dist`. Default:
        does nothing.
        """

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry with which the examples of a micro-batch begin.

        A carry is a dataclass, dict or tuple of tensors whose first dimension is the example.
        Called on each rank for its own shards, before the first step and after a skipped one; every
        other step gets the carry of the `StepOut` before it. Checkpoints hold it by shard. Default:
        None, nothing is remembered.
        """
        return None

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Returns sums over a micro-batch that the loss needs of the whole batch.

        Called on each rank for each micro-batch of a step, without gradients, before the first
        `forward`. They are summed over micro-batches and ranks, and `forward` finds them in
        `ctx.totals`. Names and shapes must be the same for every batch. Default: none.
        """
        return {}

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        """Returns fresh evaluators for a set whose batches have the same keys as `row`.

        Called on all ranks, once for each set of an evaluation. They get every batch of the set
        with its prediction. Default: none, only the means of `predict`.
        """
        return ()

    def move_to_devices(self, dist: Dist) -> None:
        """Moves the net to this rank's device.

        Called once, on all ranks together, after the net is built. Default: everything goes to
        `dist.device`.
        """
        with dist.agreed():
            self.to(dist.device)

    def movable(self) -> Sequence[tuple[nn.Module, float]]:
        """Returns the frozen parts that `move_to_devices` may put on further GPUs of a rank, in
        turn, and what share of a step's operations is theirs.

        Called where memory is planned. Default: none.
        """
        return ()

    def shardable(self) -> Sequence[nn.Module]:
        """Returns the modules whose weights sync=fsdp may fetch and release one by one.

        Only a module's own forward may use its weights. They are whole within `forward`,
        `statistics`, `predict` and `evaluators`, and nowhere else. Called once, on all ranks.
        Default: none, the net is fetched as a whole.
        """
        return ()

    def published(self, path: str) -> Mapping[str, Tensor] | None:
        """Returns the weights, by this net's names, from a folder in which others published them.

        Called for `init_from`, on rank 0. Returns None if `path` does not hold such weights, which
        is the default.
        """
        return None

    def compile_net(self) -> None:
        """Compiles in place, so that names in checkpoints stay as they are.

        Called once on each rank, before the first step, if the run compiles. Default: compiles
        `model` as a whole.
        """
        for layer in self._dropouts:  # each step has other noise, and would be compiled anew
            layer.mask = torch.compiler.disable(layer.mask)  # type: ignore[method-assign]
        self.model.compile(dynamic=False)

    def flops_per_example(self) -> int | None:
        """Returns the FLOPs of an example's forward and backward pass, for the log on GPUs.

        Default: None, a pass is made to count them.
        """
        return None

    def judging_metric(self, asked: str | None) -> Metric:
        """Returns the metric that chooses the best checkpoint: `asked`, by default the headline."""
        if not asked:
            return Metric(f"eval/{self.headline.name}", self.headline.lower_is_better)
        metric = Metric.parse(asked)
        # a user who names a cost means its smallest value, with or without the minus
        costs = {*self.costs, *([self.headline.name] if self.headline.lower_is_better else [])}
        is_cost = metric.name.rpartition("/")[2] in costs
        return Metric(metric.name, metric.lower_is_better or is_cost)


def _give_noise(objective: Objective, arguments: tuple[Batch, Carry, Context]) -> None:
    """Hands the step's noise to the dropout layers before a forward pass."""
    objective.draw_from(arguments[2].noise)


# ---- evaluations: more than means ----


@dataclass(frozen=True)
class Report:
    """The result of one evaluator on one set."""

    metrics: dict[str, float] = field(default_factory=dict)  # logged as `eval/name`, on every rank
    # content by file name; the report page shows `*.scene.json` (utils/measure/scene.py)
    files: dict[str, str | bytes] = field(default_factory=dict)
    text: str = ""  # printed at the end of the run
    line: str = ""  # printed after the means in the log's line on each evaluation


class Evaluator(Protocol):
    """Measures more than means on one set. A new one is made for each evaluation."""

    @property
    def scalars(self) -> Sequence[str]:
        """The names of the metrics that `report` returns, unless there is nothing to measure."""
        ...

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Adds one of this rank's batches, which is on the CPU, and its prediction, which is on the
        device; rows beyond `indices` are padding. Called on the rank that evaluates the batch.
        """
        ...

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's results as tensors of one length, which are gathered to rank 0; {} if
        there are none.
        """
        ...

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Returns metrics and files. Called on rank 0 with all ranks' rows, on the CPU and
        in no particular order; {} if no rank has any.
        """
        ...


# ---- what sources get from a run, and tell it and the net ----


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
        values = {field.name: config.get(field.name) for field in fields(cls)}
        lengths = [values[key] for key in ("epochs", "max_tokens", "max_steps")]
        if values["eval_only"] and lengths == [None] * 3:
            values["max_steps"] = 1  # nothing is trained, so any length will do
        return cls(**{name: value for name, value in values.items() if value is not None})

    def refuse_epochs(self) -> None:
        """For data without epochs: raises ConfigError if the run is given some."""
        for key, value in (("epochs", self.epochs), ("eval_interval", self.eval_interval)):
            if value is not None:
                raise ConfigError(
                    f"{key}={value}: this data has no epochs; use max_steps and eval_every_steps"
                )

    def refuse_path(self) -> None:
        """For data that is drawn: raises ConfigError if the run is given a folder."""
        if self.data_path is not None:
            raise ConfigError(
                f"data_path={self.data_path}: this data is drawn anew, not read; leave data_path"
                " out"
            )


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
        """The length of a run on data without epochs: `max_steps` alone sets it."""
        run.refuse_epochs()
        if run.max_steps is None:
            raise ConfigError(
                "max_steps=null: this data has no epochs; say how many steps to train"
            )
        return cls(run.max_steps, run.global_batch_size, None, run.eval_every_steps)

    def evaluates_after(self, done: int) -> bool:
        """True after the last step, after each iteration, and every `eval_every_steps` steps."""
        every = self.eval_every_steps
        return (
            done == self.total_steps
            or (every is not None and done > 0 and done % every == 0)
            or (self.ends_iteration is not None and self.ends_iteration(done))
        )


class MissingFact(ConfigError, AttributeError):
    """A net asks for a fact that the data at hand does not have."""


@dataclass(frozen=True)
class Spec:
    """Shapes and sizes that a net learns from its source.

    A line of research whose data has other facts subclasses it beside its source:

        @dataclass(frozen=True)
        class SignalSpec(Spec):
            channels: int = 0

    Its nets then read `spec.channels`; with other data that is an error of one line.
    """

    vocab_size: int = 0  # of examples that are sequences of tokens
    seq_len: int = 0
    # changes with the training data: a hash of its files, by data.files.content_hash. Data that is
    # drawn needs none: a run compares its first batch anyway
    fingerprint: str = ""
    name: str = field(default="the data", compare=False)  # shown to the user

    def __getattr__(self, name: str) -> Any:
        """Called for facts that this data does not have."""
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise MissingFact(
            f"the net needs `{name}`, which {self.name} does not have; use other data"
        )
