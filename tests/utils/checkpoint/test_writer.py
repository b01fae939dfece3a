"""Saving in the background: alone, together, on a full disk, and killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest
import torch
from torch import nn

from tests.ranks import ROOT, check_ended_well, run_module
from tests.utils.checkpoint.helpers import META, groups, names, value_of
from tests.utils.checkpoint.ranks_writer import full_disk
from utils.checkpoint import reader, writer
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist

MODULE = "tests.utils.checkpoint.ranks_writer"


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


class Gate:
    """A writer that waits until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.addresses = threading.Event(), []
        write = writer.write

        def slow(file, slices):
            assert self.open.wait(20)
            self.addresses.append({name: each.tensor.data_ptr() for name, each in slices.items()})
            return write(file, slices)

        monkeypatch.setattr(writer, "write", slow)


def test_the_caller_goes_on_and_changes_its_tensors(
    one: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, state = Gate(monkeypatch), groups(1.0)
    one.save(1, state, {**META, "value": 1.0})
    state["model"]["weight"].fill_(99.0)  # type: ignore[union-attr]
    state["shards"]["0/state/0"].tensor.fill_(99.0)  # type: ignore[union-attr]
    assert reader.newest_whole(tmp_path / "checkpoints", pytest.fail) is None
    gate.open.set()
    assert one.wait() == ""
    assert value_of(tmp_path) == 1.0


def test_a_save_waits_for_the_one_before_and_tells_for_how_long(
    one: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    one.save(1, groups(1.0), META)
    first = one.take_stall_s()
    threading.Timer(0.4, gate.open.set).start()
    started = time.perf_counter()
    one.save(2, groups(2.0), META)
    assert first < 0.2
    assert 0.3 < one.take_stall_s() <= time.perf_counter() - started
    assert one.take_stall_s() == 0.0
    assert one.wait() == ""


def test_the_copies_memory_is_used_again(one: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    for step, rows in ((1, 40), (2, 40), (3, 50)):
        one.save(step, {"model": groups(float(step), rows)["model"]}, {})
        assert one.wait() == ""
    first, second, third = [call["weight"] for call in gate.addresses]
    assert first == second
    assert third != second


def test_closing_finishes_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    made = Writer(tmp_path, Dist(), pytest.fail)
    made.save(1, groups(1.0), META)
    threading.Timer(0.2, gate.open.set).start()
    made.close()
    assert reader.load(tmp_path)[1]["step"] == 1


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


def test_a_failure_is_told_and_the_next_success_forgets_it(
    one: Writer, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    fail = "checkpoint of step {} FAILED on rank 0: No space left on device; training goes on, {}"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", full_disk)
        one.save(1, groups(1.0), META)
        assert one.wait() == "rank 0: No space left on device"
        assert said == [fail.format(1, "there is no whole one yet")]
        assert names(directory) == set()
    one.save(2, groups(2.0), META)
    assert (one.wait(), one.failures) == ("", 0)
    for name in ("fsync", "replace", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full_disk)
            one.save(3, groups(3.0), META, best=True)
            assert one.wait() == "rank 0: No space left on device"
        assert one.best_failed
        assert said.pop() == fail.format(3, "the last whole one is step_2")
        assert (directory / "latest").read_text() == "step_2\n"
        assert reader.load(directory)[1]["step"] == 2
    assert one.failures == 3
    one.save(4, groups(4.0), META)
    assert (one.wait(), one.failures) == ("", 0)
    assert reader.load(directory)[1]["step"] == 4


def test_a_log_that_cannot_be_written_does_not_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Writer(tmp_path, Dist(), full_disk)
    monkeypatch.setattr(writer, "write", full_disk)
    made.save(1, groups(1.0), META)
    assert made.wait() == "rank 0: No space left on device"
    made.close()


def test_a_full_disk_costs_no_checkpoint(small_disk: Path, said: list[str]) -> None:
    directory = small_disk / "run" / "checkpoints"
    made = Writer(directory, Dist(), said.append, keep=2)
    rows = 1_300_000 // (30 * 4)  # three of these do not fit
    for step in (1, 2):
        made.save(step, groups(float(step), rows), META)
        assert made.wait() == ""
    whole = reader.digest(small_disk / "run")
    for spare in (1_000_000, 30_000, 5_000, 0):  # the disk fills up at another file each time
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(b"x" * max(0, free - spare))
        made.save(3, groups(3.0, rows), META)
        assert "No space left on device" in made.wait()
        assert said.pop().endswith(
            "No space left on device; training goes on, the last whole one is step_2"
        )
        assert names(directory) == {"latest", "step_1", "step_2"}
        assert reader.digest(small_disk / "run") == whole
        (small_disk / "filler").unlink()
    assert made.failures == 4
    shutil.rmtree(directory / "step_1")
    made.save(4, groups(4.0, rows), META)
    assert (made.wait(), made.failures) == ("", 0)
    made.close()


def test_ranks_save_together_and_fail_together(tmp_path: Path) -> None:
    check_ended_well(run_module(3, MODULE, "save_together", str(tmp_path)))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank in range(3):
        assert ranks[rank]["good"] == [["", 0]] * 3
        assert ranks[rank]["full"] == [
            ["rank 1: No space left on device", 1],
            ["rank 1: No space left on device", 2],
        ]
        assert ranks[rank]["again"] == ["", 0]
        assert ranks[rank]["slow"] == ["", 0], "that a disk is slow is no failure, on any rank"
        assert ranks[rank]["apart"] == (
            f"checkpoint_path={tmp_path}: rank 2 on {gethostname()} cannot see what rank 0 writes"
            " there; give a folder on a disk that all hosts share"
        )
        # at most the last outcome of each writer, and of a save that failed
        assert ranks[rank]["keys"] <= 6
    assert ranks[0]["hurried"][0]
    assert all(ranks[rank]["hurried"][1] < 5 for rank in range(3))
    assert ranks[1]["said"] == ranks[2]["said"] == []
    assert ranks[0]["said"][:2] == [
        f"checkpoint of step {step} FAILED on rank 1: No space left on device; training goes on,"
        " the last whole one is step_3"
        for step in (4, 5)
    ]
    assert names(tmp_path / "good") == {"latest", "step_3", "step_6"}
    assert reader.newest_whole(tmp_path / "good", pytest.fail) == tmp_path / "good" / "step_6"
    assert [names(tmp_path / name) for name in ("apart", "elsewhere", "hurried")] == [set()] * 3


def script(function: str, folder: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, function, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(
        (folder / f"{function.removeprefix('killed_at_').removeprefix('killed_')}.json").read_text()
    )


@pytest.mark.slow
def test_killed_before_every_change_of_the_file_system(tmp_path: Path) -> None:
    deaths = script("killed_everywhere", tmp_path)
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


def test_killed_at_random_moments(tmp_path: Path) -> None:
    result = script("killed_at_random", tmp_path)
    assert result["value"] >= 30  # saves went on between the kills
    assert result["dirty"] >= 8  # and kills came in the middle of saves
