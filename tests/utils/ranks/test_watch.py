"""All ranks fail together, with the failing rank's own error first, and stop together when asked:
real processes, disturbed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as c10d

from tests.ranks import Completed, run_module
from tests.utils.ranks.ranks_watch import TIMEOUT_S
from utils.ranks.watch import Beat, beats_of, hang


def played(scenario: str, rank: int, ranks: int = 2) -> list[Completed]:
    return run_module(ranks, "tests.utils.ranks.ranks_watch", scenario, str(rank))


FOUND = {  # what rank 0 prints, and the exit status of both
    "fail_to_configure": ("error on rank 1: cannot\n", 2),  # rank 0 has found no such thing
    "fail_alike": ("error: the loss is not finite\n", 1),
    "exit_quietly": ("error: rank 1 ended with exit status 3\n", 3),
    "fail_differently": ("error on rank 1: of rank 1\n", 2),  # it was the first
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FOUND)
def test_what_ranks_find_is_said_once(scenario: str) -> None:
    text, status = FOUND[scenario]
    first, second = played(scenario, 1)
    assert (first.returncode, second.returncode) == (status, status)
    assert (first.stderr, second.stderr) == (text, "")


@pytest.mark.slow
def test_ranks_that_need_nobody_at_the_moment_end_too() -> None:
    first, second = played("fail_while_others_compute", 0)
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stderr.startswith("error on rank 0: ZeroDivisionError: cannot\nTraceback")
    assert (second.stdout, second.stderr) == ("last words: ZeroDivisionError: cannot\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_is_stopped_is_named(absent: int) -> None:
    done = played("stand_still", absent)
    assert [rank.returncode for rank in done] == [1, 1], "once it goes on, it finds out"
    line = (
        f"error: rank {absent} did not come within timeout_s={TIMEOUT_S:g} s: it no longer answers"
        " (stopped, or its host is down)"
    )
    assert done[1 - absent].stderr.startswith(line)
    assert done[1 - absent].stderr.count("\n") == 1


@pytest.mark.slow
def test_a_rank_prints_its_own_error_where_rank_0_does_not_answer() -> None:
    first, second = played("fail_while_rank_0_stands_still", 1)
    assert (first.returncode, second.returncode) == (1, 1)
    assert second.stderr.startswith("error on rank 1: ZeroDivisionError: cannot\nTraceback")
    assert not re.search("^error: rank 0", second.stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_healthy_run_says_nothing_also_when_ranks_leave_one_by_one() -> None:
    assert [(rank.returncode, rank.stderr) for rank in played("leave", 2, ranks=3)] == [(0, "")] * 3


def test_beats_of_many_ranks_are_read_at_once() -> None:
    class Counting:
        def __getattr__(self, name: str) -> Callable[..., object]:
            requests.append(name)
            return getattr(store, name)

    store, requests = c10d.HashStore(), list[str]()
    counting: Any = Counting()
    for rank in range(64):
        entered = [beat.entered for beat in beats_of(counting, 64)]
        assert entered == [*range(rank), *[0] * (64 - rank)]
        store.set(f"beat/{rank}", json.dumps([7, rank, True, "here"]))
    requests.clear()
    assert [beat.entered for beat in beats_of(counting, 64)] == list(range(64))
    assert len(requests) == 2


def test_who_holds_up_the_others() -> None:
    """By how many waits each rank has entered. Here is what two real ranks do not show."""
    waits, works, past = Beat(9, 5, True, "x"), Beat(9, 4, False, "y"), Beat(9, 5, False, "z")
    ended = Beat(9, 5, False, "y", answers=False, has_left=True)
    late = "{} did not come within timeout_s=60 s: {}; the others wait at x"
    stuck = "the ranks wait for each other for longer than timeout_s=60 s: rank 0 at x; rank 1 at y"
    for beats, line in (
        ([works, waits, past], late.format("rank 0", "it is at y")),
        ([works, waits, works], late.format("ranks 0, 2", "rank 0 is at y")),
        ([waits, ended], late.format("rank 1", "it has ended already")),
        ([waits, Beat(9, 4, True, "y")], stuck),
    ):
        assert hang(beats, 60) == line
