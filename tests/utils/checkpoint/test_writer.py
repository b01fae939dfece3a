"""Saving: in the background or not, alone or together, on a troubled disk, killed at any moment."""

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs import launched
from tests.utils.checkpoint.helpers import (
    META,
    Held,
    alone,
    groups,
    held,
    names,
    on_ranks,
    value_of,
)
from utils.checkpoint import reader, writer
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist
from utils.ranks.one_by_one import OneByOne

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


def test_the_caller_goes_on_and_changes_its_tensors(
    one: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, state, write = threading.Event(), groups(1.0), writer.write
    monkeypatch.setattr(writer, "write", lambda *given: gate.wait(20) and write(*given))
    one.save(1, held(state), {**META, "value": 1.0})
    state["model"]["weight"].fill_(99.0)
    state["shards"]["0/state/0"].fill_(99.0)
    assert reader.newest_whole(tmp_path / "checkpoints", pytest.fail) is None
    gate.set()
    assert one.wait() == ""
    assert value_of(tmp_path) == 1.0


@pytest.mark.parametrize("room", [True, False])
def test_shared_and_strided_memory(
    room: bool, one: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "free_bytes", lambda: 10**9 if room else 0)
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
    one.save(1, held({"model": tensors, "optimizer": {}}), META)
    assert one.wait() == ""
    loaded = reader.load(tmp_path)[0]
    assert loaded["model"].keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(loaded["model"][key], tensor), key
    assert loaded["optimizer"] == {}
    # a view brings only itself
    assert (tmp_path / "checkpoints" / "step_1" / "model.safetensors").stat().st_size < 2000


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_ranks_save_together_and_fail_together(
    number: int, ranks: int, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of rank 0 takes only a part of the second save. Nothing is left of that."""
    write, said, why = writer.write, list[str](), os.strerror(number)
    monkeypatch.setattr(writer, "free_bytes", lambda: 10**9 if room else 1000)

    def fails(file: Path, shapes: Any, tensors: Any) -> Any:
        if file.parent.name.startswith(".step_2.") and file.name == "ema.safetensors":
            file.write_bytes(b"half")
            raise OSError(number, why)
        return write(file, shapes, tensors)

    def saves(dist: Dist) -> list[str]:
        made = Writer(tmp_path, dist, said.append)
        outcomes = []
        for step in (1, 2, 3, 4):
            saved = Held(dist, float(step), splits=True).snapshot({})[0]
            made.save(step, saved, {**META, "value": float(step)})
            assert (made._thread is not None) == (room and dist.is_main)
            outcomes.append(made.wait())
        made.close()
        assert made.failures == 0
        return outcomes

    monkeypatch.setattr(writer, "write", fails)
    assert on_ranks(ranks, saves) == [["", why, "", ""]] * ranks
    assert said.pop() == (
        f"checkpoint of step 2 FAILED ({why}); training goes on, the last whole one is step_1"
    )
    waits = "checkpoints are written while training waits: a copy takes 5,090 bytes of memory, and"
    assert said == ([] if room else [f"{waits} 1,000 are free"]), "said once"
    assert names(tmp_path) == {"latest", "step_3", "step_4"}
    assert value_of(tmp_path) == 4.0
    assert reader.digest(tmp_path) == reader.digest(alone(tmp_path / "alone", 4))


def test_what_fails_while_ranks_bring_a_tensor_is_no_fault_of_the_disk(
    one: Writer, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training cannot go on without the other ranks."""
    monkeypatch.setattr(writer, "free_bytes", lambda: 0)

    def gone(name: str) -> torch.Tensor:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        one.save(1, {"model": OneByOne({"a": torch.ones(2)}, gone)}, META)
    assert reader.newest_whole(tmp_path / "checkpoints", pytest.fail) is None


def test_another_save_takes_the_memory_of_the_last(
    one: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no more; another shape needs new memory."""
    one.save(1, held(groups(1.0)), {**META, "value": 1.0})
    assert one.wait() == ""
    places = {key: buffer.data_ptr() for key, buffer in one._buffers.items()}
    monkeypatch.setattr(writer, "free_bytes", lambda: 100)
    grown = groups(2.0)
    grown["ema"]["average"] = torch.full((2, 4), 2.0)
    one.save(2, held(grown), {**META, "value": 2.0})
    assert one.wait() == ""
    after = {key: buffer.data_ptr() for key, buffer in one._buffers.items()}
    del places["ema", "average"]
    assert places.items() <= after.items()
    assert value_of(tmp_path) == 2.0


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
