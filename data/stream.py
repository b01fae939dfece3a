"""Makes the batches of one rank from a source: its shards, step by step, for training, and its part
of a set for evaluation.

PyTorch's DataLoader prefetches training batches in `num_workers` processes. Each sends its batches
through shared memory, which takes a millisecond a step; so a source that makes a batch in less time
is better off without workers.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from contract import Arrays, Batch, Context, Examples, Noise, Source
from data.source import check_batch
from utils.errors import ConfigError, LocalError, RankError, brief, full_name
from utils.ranks import signals
from utils.transfer import batch_to_device

PREFETCHED = 4  # steps, by each worker
SETTLED_S = 0.02  # until other threads have done what the last collective left to them
INSTEAD = "num_workers=0 loads in the training process"


class ShardStream(IterableDataset):
    """The batches of one rank in these steps.

    `shard_groups` are the rank's shards, one group for each micro-batch.
    """

    def __init__(self, source: Source, shard_groups: Sequence[Sequence[int]], steps: range) -> None:
        self._source, self._steps = source, steps
        self._shard_groups = [list(shards) for shards in shard_groups]

    def __iter__(self) -> Iterator[Batch | Exception]:
        """Yields each step's batch; worker w of W those of steps w, w + W, … after the first.

        A loader takes one batch from each worker in turn, so that steps come in order.
        """
        worker = get_worker_info()
        steps = self._steps[worker.id :: worker.num_workers] if worker else self._steps
        return map(self._read, steps)

    def _read(self, step: int) -> Batch | Exception:
        """Returns a step's examples, shard after shard, or the error that ends the run.

        The error is returned because the loader would add a page of traceback to a raised one.
        """
        # as one batch, which costs less to send than one for each micro-batch
        shards = [shard for group in self._shard_groups for shard in group]
        try:
            batch = read_shards(self._source, step, shards)
        except ConfigError as error:
            return LocalError(str(error))
        if get_worker_info() is None:
            return batch
        # shared here: the loader's own thread would do it later, and lose the batch without an
        # error where shared memory is full
        try:
            return {name: tensor.share_memory_() for name, tensor in batch.items()}
        except RuntimeError as error:
            if "shared memory" not in str(error):
                raise
            return _no_room(error)

    def cut(self, batch: Batch) -> list[Batch]:
        """Cuts a step's examples into its micro-batches."""
        if len(self._shard_groups) == 1:
            return [batch]
        shards = sum(len(group) for group in self._shard_groups)
        micro_batches: list[Batch] = [{} for _ in self._shard_groups]
        for name, tensor in batch.items():
            # every shard has as many rows, so a group's rows follow from how many shards it has
            sizes = [len(tensor) // shards * len(group) for group in self._shard_groups]
            for micro_batch, rows in zip(micro_batches, tensor.split(sizes), strict=True):
                # cloned: a tensor's alignment may decide in which order a CPU kernel adds (pinned
                # memory is copied to a GPU anyway)
                micro_batch[name] = rows if rows.is_pinned() else rows.clone()
        return micro_batches


def read_shards(source: Source, step: int, shards: Sequence[int]) -> Batch:
    """Returns the examples of these shards, one shard after another; raises ConfigError unless they
    are alike.
    """
    where = f"{full_name(source)}.train_batch"
    # shards may be on different ranks, which must all compute batches of one shape
    pieces = [check_batch(where, source.train_batch(step, shard)) for shard in shards]
    first = {name: array.shape for name, array in pieces[0].items()}
    for shard, piece in zip(shards, pieces, strict=True):
        shapes = {name: array.shape for name, array in piece.items()}
        if shapes != first:
            raise ConfigError(
                f"{where}: step {step}: shard {shard} has {_shown(shapes)}, and shard {shards[0]}"
                f" {_shown(first)}; give every shard as many rows, padded to one length"
            )
    return to_tensors(pieces)


def first_batch(
    source: Source, seed: int, device: torch.device, shards: Sequence[int]
) -> tuple[Batch, Context]:
    """Returns what the first step would see of these shards."""
    batch = batch_to_device(read_shards(source, 0, shards), device)
    return batch, Context(0.0, Noise(seed, 0, shards, device))


def not_finite(shard_groups: Sequence[Sequence[int]], micro_batches: Sequence[Batch]) -> str:
    """Names the first shard that holds NaN or an infinity, if one does."""
    for shards, batch in zip(shard_groups, micro_batches, strict=True):
        for name, rows in batch.items():
            if len(bad := (~rows.isfinite()).flatten().nonzero()):
                return f"{name} of shard {_shard_at(int(bad[0]), rows, shards)}"
    return ""


@contextmanager
def naming_step(noise: Noise, batch: Batch) -> Iterator[None]:
    """Adds the values of the batch to PyTorch's error about a label or token out of range."""
    try:
        yield
    except IndexError as error:
        if not re.match(r"Target .* out of bounds|index out of range in self", str(error)):
            raise
        # PyTorch names neither the tensor nor the example: the range of each one's numbers shows
        # what is wrong
        held = []
        for name, rows in batch.items():
            if not rows.is_floating_point():
                numbers = rows.long().flatten()
                ends = (
                    f"{int(numbers[at])} (shard {_shard_at(int(at), rows, noise.shards)})"
                    for at in (numbers.argmin(), numbers.argmax())
                )
                held.append(f"{name} holds {' to '.join(ends)}")
        found, there = brief(error).rstrip("."), ", ".join(held)
        raise LocalError(f"step {noise.step + 1}: {found}; {there}") from error


def _shard_at(number: int, rows: Tensor, shards: Sequence[int]) -> int:
    """Returns the shard of a micro-batch that a number of it belongs to."""
    return shards[number * len(shards) // rows.numel()]


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items())


def to_tensors(pieces: Sequence[Arrays]) -> Batch:
    """Concatenates arrays into one batch of tensors."""
    return {
        name: torch.from_numpy(np.concatenate([piece[name] for piece in pieces]))
        for name in pieces[0]
    }


class Cursors:
    """How far a source that can only be read forwards has been read, shard by shard, for
    checkpoints.

    Its batches also depend on the cursors, and so are the same at any number of ranks. It has

        cursor: names of the numbers that say how far a shard has been read
        cursors(step, shards): their values for each of these shards when so many steps are done
        go_on(cursors): goes on from these, which are this rank's; called once, before training

    and is asked for each shard's steps in order, from its cursor on. Before that, it may be asked
    for step 0, also of another rank's shard, which must not move a cursor.
    """

    def __init__(self, source: Any, done: Callable[[], int], owned: Sequence[int]) -> None:
        """`done` returns the number of steps done; `owned` are this rank's shards."""
        self._source, self._done, self._owned = source, done, owned

    def state(self) -> dict[int, Batch]:
        """Before the first step there is none."""
        step = self._done()
        cursors = self._source.cursors(step, self._owned) if step else {}
        return {
            shard: {name: torch.tensor(cursor[name]) for name in self._source.cursor}
            for shard, cursor in cursors.items()
        }

    def expected(self, saved: Mapping[str, Tensor], step: int) -> Batch:
        number = torch.empty((), dtype=torch.int64, device="meta")
        return dict.fromkeys(self._source.cursor, number) if step else {}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        cursors = {
            shard: {name: int(number) for name, number in cursor.items()}
            for shard, cursor in saved.items()
            if cursor
        }
        if cursors:
            self._source.go_on(cursors)


def train_loader(
    source: Source,
    shard_groups: Sequence[Sequence[int]],
    steps: range,
    workers: int = 1,
    pin_memory: bool = False,
) -> Generator[tuple[int, list[Batch]], None, None]:
    """Yields each step and its micro-batches, which hold these groups of shards, until the last
    step or `close()`. `workers` processes prefetch them (0: none).
    """
    stream = ShardStream(source, shard_groups, steps)
    # without workers, PyTorch's loader would only add its time
    batches: Any = _prefetched(stream, workers, pin_memory) if workers else iter(stream)
    try:
        for step in steps:
            yield step, stream.cut(_next(batches))
    finally:
        if workers:
            batches._shutdown_workers()  # now, not when the garbage collector comes round


def _prefetched(stream: ShardStream, workers: int, pin_memory: bool) -> Any:
    loader: DataLoader = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=PREFETCHED,
        worker_init_fn=_start_worker,
        # forked workers share the source's tables, and start at once
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    # A thread of gloo that lets go of a tensor enters the interpreter for a moment. A process that
    # is forked just then hangs forever in CPython before 3.11.10 (gh-112275).
    time.sleep(SETTLED_S)
    # PyTorch's own handler raises wherever the main thread is when a worker dies
    before = signal.getsignal(signal.SIGCHLD)
    try:
        batches = iter(loader)
    except OSError as error:
        raise _no_room(error) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    return batches


def _next(batches: Any) -> Batch:
    """Returns the next step's batch, or raises the error that ends the run."""
    try:
        batch = next(batches)
    except (RuntimeError, OSError, EOFError) as error:
        # a worker that dies may take along what it had sent, which shows as any of these errors
        died = any(process.exitcode for process in getattr(batches, "_workers", ()))
        if not died and "DataLoader worker" not in str(error):
            raise
        raise RankError(
            f"a loader process died ({brief(error)}), as when memory or /dev/shm runs out;"
            f" {INSTEAD}"
        ) from None
    if isinstance(batch, Exception):
        raise batch
    return batch


def _no_room(error: Exception) -> RankError:
    reason = " ".join(str(error).split())
    return RankError(
        f"loader processes cannot share what they load ({reason}); make shared memory (/dev/shm)"
        f" larger, or {INSTEAD}"
    )


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    signals.quiet_worker()  # signals are the main process's to handle


def eval_batches(
    eval_set: Examples, batch_size: int, rank: int = 0, world_size: int = 1, most: int | None = None
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields this rank's batches of an evaluation set, or of its `most` first examples, each as
    indices of examples and tensors.

    Batches are the same at any number of ranks, and all have one size. Every rank yields equally
    many: its last may be padding alone, with no indices.
    """
    # a batch larger than the set would only add padding
    count = min(len(eval_set), most or len(eval_set))
    batch_size = max(1, min(batch_size, count))
    total = -(-count // batch_size)
    # ranks take turns, so that all work until the end; beyond the set, a rank's batch is empty
    for first in range(0, total, world_size):
        start = min((first + rank) * batch_size, count)
        indices = np.arange(start, min(start + batch_size, count))
        try:
            pieces = [eval_set.read(indices)] if len(indices) else []
        except ConfigError as error:
            raise LocalError(str(error)) from None  # other ranks read other rows of the file
        if len(indices) < batch_size:
            pieces.append(eval_set.padding(batch_size - len(indices)))
        yield indices, to_tensors(pieces)
