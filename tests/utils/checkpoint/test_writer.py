"""Saving in the background: alone, together, where one disk is full, and killed at any moment."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tests.runs import launched
from tests.utils.checkpoint.helpers import META, SHARDS, groups, names, ranks_beside, value_of
from utils.checkpoint import reader, writer
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks.distributed import Dist

T = TypeVar("T")
FULL = "No space left on device"
MODULE = "tests.utils.checkpoint.killed_writer"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def one(tmp_path: Path, said: list[str]) -> Iterator[Writer]:
    threads = threading.active_count()
    made = Writer(tmp_path / "checkpoints", Dist(), said.append)
    yield made
    made.close()
    assert threading.active_count() == threads


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, FULL)


def test_the_caller_goes_on_and_changes_its_tensors(
    one: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, state, write = threading.Event(), groups(1.0), writer.write
    monkeypatch.setattr(writer, "write", lambda *given: gate.wait(20) and write(*given))
    one.save(1, state, {**META, "value": 1.0})
    state["model"]["weight"].fill_(99.0)  # type: ignore[union-attr]
    state["shards"]["0/state/0"].tensor.fill_(99.0)  # type: ignore[union-attr]
    assert reader.newest_whole(tmp_path / "checkpoints", pytest.fail) is None
    gate.set()
    assert one.wait() == ""
    assert value_of(tmp_path) == 1.0


def test_shared_and_strided_memory(one: Writer, tmp_path: Path) -> None:
    bucket, tied = torch.arange(12.0), nn.Parameter(torch.ones(3))
    tensors = {
        "a": bucket[:6].view(2, 3),
        "b": bucket[6:],
        "all": bucket,
        "t": bucket.view(3, 4).t(),
        "one": tied,
        "two": tied,
    }
    tensors |= {
        "none": torch.empty(0),
        "wide": torch.ones(1).expand(4, 5),
        "scalar": torch.tensor(True),
    }
    one.save(1, {"model": tensors, "optimizer": {}}, META)
    assert one.wait() == ""
    loaded = reader.load(tmp_path)[0]
    assert loaded["model"].keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(loaded["model"][key], tensor), key
    assert loaded["optimizer"] == {}
    # a view brings only itself
    assert (tmp_path / "checkpoints" / "step_1" / "model.safetensors").stat().st_size < 2000


def on_ranks(ranks: int, work: Callable[[Dist], T]) -> list[T]:
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(work, ranks_beside(ranks))]


def test_ranks_save_together_and_fail_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for one rank alone; nothing is left of that save, or in the store."""
    write, said = writer.write, list[str]()

    def full_for_one(file: Path, slices: Any) -> Any:
        if file.parent.name.startswith(".step_2.") and file.name == "model.1.safetensors":
            file.write_bytes(b"half")
            full_disk()
        return write(file, slices)

    def saves(dist: Dist) -> tuple[list[str], int]:
        made = Writer(tmp_path, dist, said.append)
        outcomes = []
        for step in (1, 2, 3, 4):
            state = groups(float(step), owned=dist.owned_shards(SHARDS))
            made.save(step, state, {**META, "value": float(step)})
            outcomes.append(made.wait())
        made.close()
        return outcomes, made.failures

    monkeypatch.setattr(writer, "write", full_for_one)
    ranks = ranks_beside(3)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(saves, ranks)] == [(["", f"rank 1: {FULL}", "", ""], 0)] * 3
    assert said == [
        f"checkpoint of step 2 FAILED on rank 1: {FULL}; training goes on, the last whole one is"
        " step_1"
    ]
    assert names(tmp_path) == {"latest", "step_3", "step_4"}
    assert value_of(tmp_path) == 4.0
    assert ranks[0].store.num_keys() <= 2, "at most the last outcome, and that of a failed save"


def test_a_rank_that_does_not_see_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "DISK_LAG_S", 0.3)

    def refused(dist: Dist) -> str:
        folder = tmp_path / ("elsewhere" if dist.rank == 2 else "run")
        folder.mkdir(exist_ok=True)
        with pytest.raises(ConfigError) as caught:
            Writer(folder / "checkpoints", dist, pytest.fail)
        return str(caught.value).partition(": ")[2]

    line = (
        f"rank 2 on {gethostname()} cannot see what rank 0 writes there; give a folder on a disk"
        " that all hosts share"
    )
    assert on_ranks(3, refused) == [line] * 3


def test_a_rank_that_may_be_dead_is_not_waited_for_long(tmp_path: Path) -> None:
    def hurried(dist: Dist) -> str:
        made = Writer(tmp_path, dist, lambda line: None)
        if dist.rank != 2:
            made.save(1, groups(1.0, owned=dist.owned_shards(SHARDS)), META)
        made.close(patience_s=0.2)
        return made.wait()

    started = time.monotonic()
    assert on_ranks(3, hurried)[0] == "rank 2: nothing heard from it for 0.2 s"
    assert time.monotonic() - started < 5
    assert names(tmp_path) == set()


def killed(where: str, folder: Path) -> dict[str, int]:
    """Returns what killed_writer.py has counted."""
    done = launched([sys.executable, "-m", MODULE, where, str(folder)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_killed_before_every_change_of_the_file_system(tmp_path: Path) -> None:
    deaths = killed("everywhere", tmp_path)
    least = {
        "mkdir": 2,
        "rename": 3,
        "replace": 2,
        "fsync": 10,
        "unlink": 8,
        "rmdir": 2,
        "write": 4,
    }
    assert all(deaths[name] >= count for name, count in least.items()), deaths


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    result = killed("random", tmp_path)
    assert result["value"] >= 30  # saves went on between the kills
    assert result["dirty"] >= 8  # and kills came in the middle of saves
