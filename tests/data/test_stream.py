import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.recursive.puzzles import PuzzleSource
from data.stream import ShardStream, to_tensors, train_loader
from tests.data.recursive.helpers import source as puzzles
from tests.data.recursive.helpers import write_dataset
from tests.ranks import run_code
from utils.errors import ConfigError, LocalError, RankError

PARTS = [range(0, 2), [2]]


@pytest.fixture
def source(tmp_path) -> PuzzleSource:
    write_dataset(tmp_path, [[1, 2], [3]] * 20)
    return puzzles(tmp_path, shards=4)


class Failing:
    """A source that fails at step 3."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or ValueError()

    def train_batch(self, step: int, shard: int) -> dict[str, np.ndarray]:
        if step == 3:
            raise self._error
        return {"process": np.full(2, os.getpid())}


def steps_of(workers: int, start: int, stop: int, error: Exception | None = None) -> Any:
    return train_loader(Failing(error), [[0]], range(start, stop), workers)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize(("start", "stop"), [(5, 31), (4, 4)])
def test_steps_come_in_order_and_whole_with_any_number_of_workers(source, workers, start, stop):
    received = list(train_loader(source, PARTS, range(start, stop), workers))
    assert [step for step, _ in received] == list(range(start, stop))
    for step, parts in received:
        for part, shards in zip(parts, PARTS, strict=True):
            expected = to_tensors([source.train_batch(step, shard) for shard in shards])
            assert part.keys() == expected.keys()
            for name in part:
                assert part[name].dtype == torch.int32
                assert part[name].storage_offset() == 0, "not a view"
                assert torch.equal(part[name], expected[name])


def test_a_loader_of_pytorch_reads_a_rank_s_stream_in_order(source):
    stream = ShardStream(source, PARTS, range(5, 31))
    assert isinstance(stream, IterableDataset)
    for alone, by_workers in zip(stream, DataLoader(stream, None, num_workers=2), strict=True):
        assert all(torch.equal(alone[name], by_workers[name]) for name in alone)


def test_batches_are_made_in_another_process_and_survive_it(source):
    steps = list(steps_of(2, 4, 40))
    assert len({int(parts[0]["process"][0]) for _, parts in steps} - {os.getpid()}) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_is_the_main_process_s_error(workers):
    message = "data_path=x: is damaged; build it again"
    with pytest.raises(LocalError) as caught:  # of this rank: it must speak
        list(steps_of(workers, 0, 9, ConfigError(message)))
    assert str(caught.value) == message
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        list(steps_of(workers, 0, 9, ZeroDivisionError("by nothing")))


def test_closing_ends_the_workers_and_ctrl_c_is_not_theirs(source):
    steps = train_loader(source, PARTS, range(10**9), workers=2)
    for _ in range(2):  # one from each
        next(steps)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
    assert [next(steps)[0] for _ in range(60)] == list(range(2, 62))
    assert all(worker.is_alive() for worker in workers)
    began = time.monotonic()
    steps.close()
    assert time.monotonic() - began < 4
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.skipif(sys.platform != "linux", reason="workers that are forked")
def test_workers_die_with_a_process_that_is_killed():
    """Or they would hold its sockets, and the lock of its run directory."""
    done = run_code("""
import os, signal, time
from tests.data.test_stream import steps_of
steps = steps_of(1, 4, 40)
next(steps)
print(time.monotonic(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert time.monotonic() - float(done.stdout) < 2, "its output ends when nobody holds it"


def test_too_little_shared_memory_is_one_line(monkeypatch):
    def full(*_):
        raise RuntimeError("unable to open shared memory object </x>: No space left on device (28)")

    monkeypatch.setattr("torch.UntypedStorage.share_memory_", full)
    with pytest.raises(RankError, match=r"No space left.*/dev/shm.*num_workers=0"):
        list(steps_of(1, 4, 40))
