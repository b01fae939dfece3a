"""From a source to the batches of one rank: its shards, step by step, prefetched by worker processes; and evaluation."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from data.source import Arrays, Batch, EvalSet, Source
from utils.errors import ConfigError, LocalError, RankError
from utils.ranks import signals

PARCEL = 8  # steps that travel together from a worker
ALIGNED = 64  # bytes: views of any dtype may begin there
DEATH_S = 1.0  # a dead worker's connections are gone a moment before it counts as dead
INSTEAD = "num_workers=0 loads in the training process"
CAUSES = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGBUS: ", as happens when shared memory is full or a file of the dataset becomes shorter",
}

StreamStep = tuple[int, list[Batch]]  # a step and its micro-batches
Layout = dict[str, tuple[int, torch.dtype, tuple[int, ...]]]  # where in a parcel a batch's tensors lie


class ShardStream(IterableDataset):
    """Steps start_step … stop_step - 1 of a rank; `parts` are its shards, grouped into micro-batches."""

    def __init__(self, source: Source, parts: Sequence[Sequence[int]], start_step: int, stop_step: int) -> None:
        self._source = source
        self._parts = [list(part) for part in parts]
        self.steps = range(start_step, stop_step)

    def __iter__(self) -> Iterator[StreamStep]:
        return map(self.at, _own(self.steps))

    def at(self, step: int) -> StreamStep:
        """One step, whenever."""
        return step, [to_tensors([self._source.train_batch(step, shard) for shard in part]) for part in self._parts]


@dataclass(frozen=True)
class _Parcel:
    """Several steps in one piece of memory: what a process hands to another costs by the piece, not by the byte."""

    steps: list[tuple[int, list[Layout]]]
    content: torch.Tensor

    @classmethod
    def of(cls, steps: list[StreamStep]) -> _Parcel:
        """Batches, one behind the other, in memory that another process can map."""
        end, layouts, placed = 0, [], []
        for step, parts in steps:
            layout: list[Layout] = []
            for part in parts:
                layout.append({})
                for name, tensor in part.items():
                    layout[-1][name] = (end, tensor.dtype, tuple(tensor.shape))
                    placed.append((end, tensor))
                    end += -(-tensor.nbytes // ALIGNED) * ALIGNED
            layouts.append((step, layout))
        content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(end))  # type: ignore[call-overload]
        for start, tensor in placed:
            content[start : start + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
        return cls(layouts, content)

    def unpack(self) -> Iterator[StreamStep]:
        """The steps, as views."""
        for step, layout in self.steps:
            yield step, [{name: self._tensor(*place) for name, place in part.items()} for part in layout]

    def _tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self.content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def pin_memory(self) -> _Parcel:
        """Called by the loader's pinning thread."""
        return replace(self, content=self.content.pin_memory())


class _ParcelStream(IterableDataset):
    """What the workers run."""

    def __init__(self, stream: ShardStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[_Parcel | Exception]:
        """Parcels; an error that is one line travels like them, because the loader would make a page of it."""
        steps = self._stream.steps
        for first in _own(steps[::PARCEL]):
            try:
                content = [self._stream.at(step) for step in range(first, min(first + PARCEL, steps.stop))]
            except ConfigError as error:
                yield LocalError(str(error))
                return
            try:
                yield _Parcel.of(content)
            except RuntimeError as error:
                if "shared memory" not in str(error):
                    raise
                yield _no_room(error)
                return


def _own(items: range) -> range:
    """A worker's share. The loader asks its workers in turn: every n-th item from each of n keeps the order."""
    worker = get_worker_info()
    return items if worker is None else items[worker.id :: worker.num_workers]


def to_tensors(pieces: Sequence[Arrays]) -> Batch:
    """Arrays, one after the other, as one batch of tensors."""
    if len(pieces) == 1:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in pieces[0].items()}
    return {name: torch.from_numpy(np.concatenate([piece[name] for piece in pieces])) for name in pieces[0]}


def train_loader(stream: ShardStream, workers: int = 1, pin_memory: bool = False) -> Generator[StreamStep, None, None]:
    """The stream, prefetched by `workers` processes (0: none). Workers start with the first step and end with `close()`."""
    if not workers:
        try:
            yield from (_pinned(step) for step in stream) if pin_memory else stream
        except ConfigError as error:
            raise LocalError(str(error)) from None
        return
    signal_handling._SIGCHLD_handler_set = True  # else PyTorch's raises wherever the main thread is when a worker dies
    loader: DataLoader = DataLoader(
        _ParcelStream(stream),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=2,
        worker_init_fn=_start_worker,
        # forked workers share the source's tables, and start at once
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        collate_fn=_unchanged,
    )
    try:
        multiprocessing.Lock()  # queues have such locks, in shared memory; a loader that fails to make one leaves a traceback behind
        parcels: Any = iter(loader)
    except OSError as error:
        raise _no_room(error) from None
    try:
        while (parcel := _received(parcels)) is not None:
            yield from parcel.unpack()
    finally:
        parcels._shutdown_workers()  # now, not when the garbage collector comes round


def _received(parcels: Any) -> _Parcel | None:
    """The next parcel; None after the last one."""
    _check_alive(parcels._workers)
    try:
        parcel = next(parcels, None)
    except (RuntimeError, OSError, EOFError) as error:  # what a dead worker had sent may go with it, which shows as any of these
        alive = {worker.sentinel: worker for worker in parcels._workers if worker.exitcode is None}
        for sentinel in wait(list(alive), DEATH_S):
            alive[sentinel].join(DEATH_S)
        _check_alive(parcels._workers)
        if "exited unexpectedly" in str(error):
            raise RankError(f"a loader process ended too early; {INSTEAD}") from None
        raise
    if isinstance(parcel, Exception):
        raise parcel
    return parcel


def _check_alive(workers: Sequence[Any]) -> None:
    for worker in workers:
        if code := worker.exitcode:  # 0: it has sent its last parcel
            how = f"was killed by {_name_of(-code)}{CAUSES.get(-code, '')}" if code < 0 else f"ended with exit status {code}"
            raise RankError(f"loader process {worker.pid} {how}; {INSTEAD}")


def _name_of(signum: int) -> str:
    return next((known.name for known in signal.Signals if known == signum), f"signal {signum}")


def _no_room(error: Exception) -> RankError:
    said = " ".join(str(error).split())
    return RankError(f"loader processes cannot share what they load ({said}); make shared memory (/dev/shm) larger, or {INSTEAD}")


def _pinned(step: StreamStep) -> StreamStep:
    number, parts = step
    return number, [{name: tensor.pin_memory() for name, tensor in part.items()} for part in parts]


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    signals.quiet_worker()  # signals are the main process's to handle
    for signum in (signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE):
        signal.signal(signum, signal.SIG_DFL)  # PyTorch's handlers print; how a worker died is told once, by the main process


def _unchanged(item: Any) -> Any:
    return item


def num_eval_batches(eval_set: EvalSet, batch_size: int) -> int:
    """Batches of a set over all ranks."""
    return -(-len(eval_set) // batch_size)


def eval_batches(eval_set: EvalSet, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[int, np.ndarray, Batch]]:
    """This rank's batches: number, example indices, tensors, all of one size. Boundaries are the same at any world size."""
    batch_size = min(batch_size, len(eval_set))  # more rows than there are examples would be nothing but padding
    for batch in range(rank, num_eval_batches(eval_set, batch_size), world_size):
        indices = np.arange(batch * batch_size, min((batch + 1) * batch_size, len(eval_set)))
        pieces = [eval_set.read(indices)]
        if len(indices) < batch_size:
            pieces.append(eval_set.padding(batch_size - len(indices)))
        yield batch, indices, to_tensors(pieces)
