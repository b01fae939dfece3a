"""Which examples a step visits: shuffled epochs cut into steps, as pure functions of the step; and
examples that are drawn instead.

An epoch visits every item once, in shuffled order. `eval_interval` epochs make an iteration. Steps
are packed across the epochs of an iteration, and visits left at its end are dropped. Without a
number of epochs, the run is one endless iteration. A *position* counts visits from the start of the
run: position p is visit `p % items` of epoch `p // items`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from contract import Arrays, Examples, RunLength, RunSettings, Source, Spec
from utils.errors import ConfigError
from utils.noise import generator

# a block of whole epochs has at least as many items: making a generator costs more than shuffling a
# small epoch
ITEMS_AT_ONCE = 4096
SCANNED = 1 << 16  # visits at a time while ragged steps are counted


class Order:
    """Shuffled epochs of the numbers 0 … items - 1; or of as many groups of numbers, of which group
    i is first[i] … first[i] + count[i] - 1, and each visit draws one.
    """

    def __init__(
        self, seed: int, items: int, groups: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """`groups` are their `first` and `count`."""
        self.items, self._seed, self._groups = items, seed, groups
        self._epochs_per_block = max(1, ITEMS_AT_ONCE // items)
        self._blocks: dict[int, np.ndarray] = {}

    def visits(self, start: int, stop: int) -> np.ndarray:
        """Returns the numbers visited at positions start … stop - 1."""
        # a step may reach from one block into the next
        size = self._epochs_per_block * self.items
        blocks, pieces = {}, []
        for number in range(start // size, (stop - 1) // size + 1):
            drawn = self._blocks.get(number)
            blocks[number] = block = self._draw(number) if drawn is None else drawn
            pieces.append(block[max(0, start - number * size) : stop - number * size])
        # Only what this call needed is kept: mostly one block, and two where an epoch ends within a
        # step. That of a large corpus is a single epoch, of 4 bytes for each item.
        self._blocks = blocks
        return np.concatenate(pieces, dtype=np.int64)

    def _draw(self, block: int) -> np.ndarray:
        # whole epochs at once, each in another order; with groups, a member is drawn for each visit
        rng = generator(self._seed, "order", block)
        numbers = np.arange(self.items, dtype=np.int32 if self.items < 1 << 31 else np.int64)
        epochs = np.tile(numbers, (self._epochs_per_block, 1))
        drawn = rng.permuted(epochs, axis=1, out=epochs).reshape(-1)
        if self._groups is None:
            return drawn
        first, count = self._groups
        return first[drawn] + rng.integers(count[drawn])


class UniformSteps:
    """Steps of visits that all have the same number of examples: positions are computed."""

    def __init__(
        self, items: int, visits_per_step: int, epochs: int | None, interval: int | None
    ) -> None:
        """`interval`: the epochs in an iteration; None: one endless iteration."""
        self._visits = items * (interval or 1)  # in an iteration
        self._width = visits_per_step
        self._steps = self._visits // visits_per_step if interval else None  # in an iteration
        self.total = 0  # steps of all epochs; 0 without a number of epochs
        self.per_epoch = items / visits_per_step
        if interval and self._steps:
            self.per_epoch = self._steps / interval
            self.total = self._steps * ((epochs or 0) // interval)

    def span(self, step: int) -> tuple[int, int]:
        """Returns the first position of a step and the one after its last. Steps never end: after
        the last epoch come others.
        """
        iteration, within = divmod(step, self._steps) if self._steps else (0, step)
        start = iteration * self._visits + within * self._width
        return start, start + self._width

    def ends_iteration(self, done: int) -> bool:
        return self._steps is not None and done > 0 and done % self._steps == 0


class RaggedSteps:
    """Steps of visits with different numbers of examples, with the methods of `UniformSteps`.

    Where a step begins depends on all visits before it in its iteration. Each iteration is scanned
    once, when it is first needed.
    """

    def __init__(
        self, order: Order, sizes: np.ndarray, batch: int, epochs: int | None, interval: int | None
    ) -> None:
        """`sizes`: the examples of each number that may be visited."""
        self._order, self._sizes, self._batch = order, sizes, batch
        self._endless = interval is None
        # an endless iteration is scanned in pieces, each from the end of the last whole step on
        self._interval = interval or 1 + batch // order.items
        self._epochs = epochs
        # for each scanned iteration: the positions where its steps begin, and where the last one
        # ends
        self._cuts: list[np.ndarray] = []
        # the number of steps before the first iteration, and up to the end of each scanned one
        self._ends = [0]

    @property
    def total(self) -> int:
        iterations = (self._epochs or 0) // self._interval
        while len(self._cuts) < iterations:
            self._scan_next()
        return self._ends[iterations]

    @property
    def per_epoch(self) -> float:
        if self._epochs:
            return self.total / self._epochs
        self.span(0)
        scanned = int(self._cuts[0][-1]) / self._order.items if self._endless else self._interval
        return self._ends[1] / scanned

    def span(self, step: int) -> tuple[int, int]:
        # scan as far as this step, then find its iteration among those scanned
        while self._ends[-1] <= step:
            self._scan_next()
        iteration = bisect_right(self._ends, step) - 1
        within = step - self._ends[iteration]
        start, stop = self._cuts[iteration][within : within + 2]
        return int(start), int(stop)

    def ends_iteration(self, done: int) -> bool:
        if self._endless or done == 0:
            return False
        while self._ends[-1] < done:
            self._scan_next()
        return self._ends[bisect_left(self._ends, done)] == done

    def _scan_next(self) -> None:
        items = self._order.items
        # an endless iteration goes on from its last step; others begin with a new epoch
        if self._cuts and self._endless:
            begin = int(self._cuts[-1][-1])
        else:
            begin = len(self._cuts) * self._interval * items
        end = begin + self._interval * items
        cuts = [begin]
        filled = 0  # examples that the open step already has when a piece begins
        # pieces of whole epochs, of about SCANNED visits
        stride = max(1, SCANNED // items) * items
        for position in range(begin, end, stride):
            visits = self._order.visits(position, min(position + stride, end))
            # how many examples there are before each visit of the piece, and in all of it
            before = np.concatenate([[0], np.cumsum(self._sizes[visits])])
            opened = -filled  # where the open step begins, counted in examples of this piece
            while True:
                # the visit that fills the step up ends it, and what is too much of it is dropped
                stop = int(before.searchsorted(opened + self._batch))
                if stop == len(before):
                    break
                cuts.append(position + stop)
                opened = int(before[stop])
            filled = int(before[-1]) - opened
        # not a single step was filled, and never would be
        if len(cuts) == 1:
            raise too_small(self._batch, filled, self._interval)
        self._cuts.append(np.array(cuts))
        self._ends.append(self._ends[-1] + len(cuts) - 1)


Steps = UniformSteps | RaggedSteps


def cut_steps(
    order: Order, sizes: np.ndarray, batch: int, epochs: int | None, eval_interval: int | None
) -> Steps:
    """Cuts an order into steps of `batch` examples. `sizes` has the number of examples of each
    number that may be visited.
    """
    # where all have one size, positions can be computed, without any scan
    size = int(sizes[0])
    if (sizes == size).all():
        return cut_evenly(order.items, batch, epochs, eval_interval, size)
    steps = RaggedSteps(order, sizes, batch, epochs, eval_interval or epochs)
    steps.span(0)  # raises at once if the data is too small
    return steps


def cut_evenly(
    items: int, batch: int, epochs: int | None, eval_interval: int | None, size: int = 1
) -> UniformSteps:
    """Cuts an order whose items all have `size` examples into steps of `batch` examples."""
    interval = eval_interval or epochs
    if interval is not None and items * interval * size < batch:
        raise too_small(batch, items * interval * size, interval)
    return UniformSteps(items, -(-batch // size), epochs, interval)


def run_length(
    steps: Steps, batch: int, max_steps: int | None, eval_every_steps: int | None
) -> RunLength:
    """Returns the length of a run of `max_steps` steps, or of all epochs. It evaluates after each
    iteration, and every `eval_every_steps` steps.
    """
    total = max_steps or steps.total
    return RunLength(total, batch, steps.per_epoch, eval_every_steps, steps.ends_iteration)


def too_small(batch: int, examples: int, interval: int) -> ConfigError:
    """Returns the error for an iteration that does not fill a single batch."""
    if not examples:
        return ConfigError(
            f"global_batch_size={batch}: the training data holds no examples; build the dataset"
            " again"
        )
    wanted = -(-batch * interval // examples)
    return ConfigError(
        f"global_batch_size={batch}: eval_interval={interval} epochs give only {examples} examples,"
        f" not one full batch; try eval_interval={wanted} (and epochs a multiple of it) or"
        f" global_batch_size={examples}"
    )


def shard_rows(rows: Sequence | np.ndarray, shard: int, shards: int):
    """Returns one shard of a global batch: one of `shards` equal, contiguous pieces."""
    size = len(rows) // shards
    return rows[shard * size : (shard + 1) * size]


class Rows(Protocol):
    """Examples that are read by their numbers."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Arrays: ...


class EpochSource(Source):
    """Examples that are all visited once an epoch, in shuffled order."""

    length: RunLength

    def __init__(self, run: RunSettings, spec: Spec, train: Rows, **eval_sets: Examples) -> None:
        self.spec, self._train, self._eval_sets, self._shards = spec, train, eval_sets, run.shards
        batch = run.global_batch_size
        self._order = Order(run.seed, len(train))
        self._steps = cut_evenly(len(train), batch, run.epochs, run.eval_interval)
        self.length = run_length(self._steps, batch, run.max_steps, run.eval_every_steps)

    def train_batch(self, step: int, shard: int) -> Arrays:
        visits = self._order.visits(*self._steps.span(step))
        return self._train.read(shard_rows(visits, shard, self._shards))

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets


class DrawnSource(Source):
    """Rows that are drawn anew in each step: define `draw`."""

    length: RunLength

    def __init__(self, run: RunSettings, stream: str) -> None:
        """`stream` names the random numbers of training."""
        if run.data_path is not None:
            raise ConfigError(
                f"data_path={run.data_path}: this data is drawn anew, not read; leave data_path out"
            )
        self._run, self._stream = run, stream
        self.length = RunLength.in_steps(run)
        # the last step and its whole batch: small draws take as long as large ones
        self._drawn: tuple[int, Arrays] | None = None

    def draw(self, rows: int, rng: np.random.Generator) -> Arrays:
        raise NotImplementedError

    def train_batch(self, step: int, shard: int) -> Arrays:
        # the whole batch is drawn once, of which each shard gets its rows
        if self._drawn is None or self._drawn[0] != step:
            rng = generator(self._run.seed, self._stream, step)
            self._drawn = step, self.draw(self._run.global_batch_size, rng)
        drawn = self._drawn[1]
        return {name: shard_rows(drawn[name], shard, self._run.shards) for name in drawn}
