"""All that your code implements for a run, and all that it receives from one.

A line of research has a `Source` in data/, and in models/ a net, which is any `nn.Module`, and an
`Objective`, the net with its loss. conf/data/YOURS.yaml and conf/arch/YOURS.yaml name them by
`_target_`, beside their keys, a recipe conf/experiment/YOURS.yaml chooses both, and the run calls

    YourSource(run, **keys of data)          run: the `RunSettings`
    YourNet(spec, **keys of arch)            spec: the source's `Spec`
    YourObjective(net, **keys of arch.loss)

    source.train_batch(step, shard)          rows, as NumPy arrays by name
    objective(batch, carry, context)         a `StepOut`: the SUM of the loss, its weight, metrics
    objective.predict(batch)                 a `Prediction`, in evaluations

and does all else: ranks, gradients, optimizers, checkpoints, logs. In return a batch depends on the
seed, the step and the shard alone, and so do random numbers, which come from `Context.noise`
(`Noise` and `Dropout` are in utils/noise.py).

A small line needs `RunSettings`, `Source`, `Spec`, `RunLength`, `Examples`, `Objective`, `StepOut`,
`Prediction` and `IGNORE`. data/README.md has a complete source, models/README.md a net with its
yaml files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.errors import ConfigError, full_name, kind_of
from utils.noise import Dropout as Dropout
from utils.noise import Noise, dropouts_of, give_noise

# Rows as a source gives them, by name; the first dimension is the example. You choose the names,
# but padding is IGNORE in names that begin with `labels`, or NaN in floats, as in a regression.
# Types are kept: convert NumPy's float64 to float32.
Arrays = dict[str, np.ndarray]
Batch = dict[str, Tensor]  # the same as an objective gets them
Carry = Any  # a dataclass, dict or tuple of tensors whose first dimension is the example
IGNORE = -100  # the label of cells, tokens and padding rows that count in no loss and no metric


class Examples:
    """An evaluation set of arrays that have a row for each example, by name; or of a map-style
    dataset whose items are dictionaries, such as PyTorch's. Sets that are scored need `labels`. A
    set that reads its examples otherwise inherits it, and defines `__len__` and `read`.
    """

    def __init__(self, examples: Arrays | Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        some = self._examples
        return len(next(iter(some.values()))) if isinstance(some, dict) else len(some)

    def read(self, indices: np.ndarray) -> Arrays:
        """Returns these examples, one row each."""
        if isinstance(self._examples, dict):
            return {name: array[indices] for name, array in self._examples.items()}
        rows = [self._examples[index] for index in indices.tolist()]
        where = f"{full_name(self._examples)}.__getitem__"
        if not isinstance(rows[0], Mapping):
            raise ConfigError(
                f"{where}: returns {kind_of(rows[0])}; return a dict by name, such as inputs and"
                " labels"
            )
        arrays: Arrays = {}
        for name in rows[0]:
            try:
                arrays[name] = np.stack([np.asarray(row[name]) for row in rows])
            except (TypeError, ValueError):
                raise ConfigError(
                    f"{where}: {name} has another shape in some examples than in others; pad it to"
                    " one"
                ) from None
        return arrays

    def padding(self, rows: int) -> Arrays:
        """Returns rows that fill a last batch and do not count: the first, without labels."""
        batch = self.read(np.zeros(rows, np.int64))
        return {
            name: np.full_like(array, np.nan if array.dtype.kind == "f" else IGNORE)
            if name.startswith("labels")
            else array
            for name, array in batch.items()
        }


class Source(Protocol):
    """The data of a run: inherit it, and define `spec`, `length` and `train_batch`.

    Every rank makes its own, from the `RunSettings` and the keys of its yaml file. Data that can
    only be read forwards, such as a stream, also has a cursor: see `Cursors` in data/stream.py.
    """

    spec: Spec
    remark: str = ""  # a line for the log at the start, such as what makes reading slow

    @cached_property
    def length(self) -> RunLength:
        """How long the run is. Read on all ranks at the same time, as counting may take seconds."""
        raise NotImplementedError(f"{full_name(self)}: define length, as RunLength.in_steps(run)")

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step, `run.global_batch_size // run.shards` of them;
        steps count from 0.

        A function of the seed, the step and the shard alone. Called on the rank that owns the
        shard, in a worker process if the run has any.
        """

    def eval_sets(self) -> Mapping[str, Examples]:
        """Returns the sets that an evaluation goes through, by name. Default: none."""
        return {}

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        """Returns fresh evaluators for an evaluation of a set: votes, answers as text, pictures."""
        return ()


# ---- nets and losses ----


@dataclass(frozen=True)
class Context:
    """All that may influence a step besides its batch and carry."""

    progress: float  # the fraction of the run's steps that are done
    noise: Noise  # random numbers of this step, for the shards of this batch
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # sums of what `statistics` returned


@dataclass(frozen=True)
class StepOut:
    """One micro-batch's part of a step."""

    loss: Tensor  # the SUM over the local examples, with gradients
    weight: Tensor  # gradients are divided by its sum over micro-batches and ranks
    metrics: Mapping[str, tuple[Tensor, Tensor]]  # by name (sum, count), whose means are logged
    carry: Carry = None  # for the next step, without gradients


@dataclass(frozen=True)
class Prediction:
    """The result of an objective on one evaluation batch."""

    metrics: Mapping[str, tuple[Tensor, Tensor]]  # by name (sum, count)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # one row per example; may be empty


class Objective(nn.Module):
    """Wraps a net as `self.model` and says what to minimise: define `forward` and `predict`."""

    model: Any
    # the metric of `predict` that a run is judged by, unless objective_metric is given
    headline = "accuracy"
    costs: frozenset[str] = frozenset()  # metrics where lower is better: losses, errors
    # called by a long `predict` as `self.progress("step", 88, 400)`, shows a line every ten seconds
    progress: Callable[[str, int, int], None] = staticmethod(lambda what, done, total: None)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dropouts = dropouts_of(model)
        self.register_forward_pre_hook(lambda it, given: give_noise(it.dropouts, given[2].noise))

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

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the net computes: its `dtype`, by default that of its weights."""
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return getattr(self.model, "dtype", None) or next(weights, torch.float32)

    def call_net(self, *inputs: Tensor) -> Tensor:
        """Calls the net with its weights cast to `dtype`, PyTorch's layers included."""
        dtype = self.dtype
        if all(weight.dtype == dtype for weight in self.model.parameters()):
            return self.model(*inputs)
        # cast in each call, so that gradients reach the original weights, which optimizers update
        weights = {name: weight.to(dtype) for name, weight in self.model.named_parameters()}
        return functional_call(self.model, weights, inputs)

    # All that follows is optional. docs/adding-an-objective.md has examples, and what only single
    # lines of research define, such as a warm-up before the first step.

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry with which the examples of a micro-batch begin.

        Called on each rank for its own shards, before the first step and after a skipped one; every
        other step gets the carry of the `StepOut` before it. Checkpoints hold it by shard.
        """
        return None

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Returns sums over a micro-batch that the loss needs of the whole batch.

        Called on each rank for each micro-batch of a step, without gradients, before the first
        `forward`, which finds them in `ctx.totals`, summed over micro-batches and ranks. Names and
        shapes must be the same for every batch. Default: none.
        """
        return {}

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        """Returns fresh evaluators for a set whose batches have the same keys as `row`. Called on
        all ranks, once for each set of an evaluation. Default: none.
        """
        return ()

    def compile_net(self) -> None:
        """Compiles in place, so that names in checkpoints stay as they are. Default: `model` as a
        whole. Called once on each rank, before the first step, if the run compiles.
        """
        for layer in self.dropouts:  # each step has other noise, and would be compiled anew
            layer.mask = torch.compiler.disable(layer.mask)  # type: ignore[method-assign]
        self.model.compile(dynamic=False)


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

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Adds one of this rank's batches, which is on the CPU, and its prediction, which is on the
        device; rows beyond `indices` are padding.
        """

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's results as tensors of one length, {} if there are none."""

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Returns metrics and files. Called on rank 0 with all ranks' rows, on the CPU and in no
        particular order; {} if no rank has any.
        """


# ---- what sources get from a run, and tell it and the net ----


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The keys of a run that every source may need, under the names that users know."""

    seed: int = 0
    shards: int = 8
    global_batch_size: int = 0  # 0 for null, which only data made of tokens allows
    epochs: int | None = None
    eval_interval: int | None = None  # in epochs
    max_steps: int | None = None
    eval_every_steps: int | None = None
    eval_only: bool = False
    num_workers: int = 0  # processes that call `train_batch`; 0: the training process does
    data_path: str | None = None


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
        for key, value in (("epochs", run.epochs), ("eval_interval", run.eval_interval)):
            if value is not None:
                raise ConfigError(
                    f"{key}={value}: this data has no epochs; use null, and max_steps and"
                    " eval_every_steps"
                )
        if run.max_steps is None:
            raise ConfigError(
                "max_steps=null: this data has no epochs; say how many steps to train"
            )
        if not run.global_batch_size:
            raise ConfigError("global_batch_size=null: say how many examples a step has")
        return cls(run.max_steps, run.global_batch_size, None, run.eval_every_steps)

    def evaluates_after(self, done: int) -> bool:
        """True after the last step, after each iteration, and every `eval_every_steps` steps."""
        if done == self.total_steps or (self.ends_iteration and self.ends_iteration(done)):
            return True
        return bool(self.eval_every_steps and done and done % self.eval_every_steps == 0)


class MissingFact(ConfigError, AttributeError):
    """A net asks for a fact that this data does not have."""


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
    # a hash of its files, by data.files.content_hash; data that is drawn needs none
    fingerprint: str = ""
    name: str = field(default="the data", compare=False)  # shown to the user

    def __getattr__(self, name: str) -> Any:
        """Called for facts that this data does not have."""
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise MissingFact(
            f"the net needs `{name}`, which {self.name} does not have; use other data"
        )
