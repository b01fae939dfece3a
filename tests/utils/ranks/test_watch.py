"""All ranks fail together, with the failing rank's own error first, and stop together when asked:
real processes, disturbed.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.ranks import Completed, run_module
from tests.utils.ranks.ranks_watch import TIMEOUT_S
from utils.ranks.watch import Beat, hang, location_of


def played(scenario: str, rank: int, ranks: int = 2) -> list[Completed]:
    return run_module(ranks, "tests.utils.ranks.ranks_watch", scenario, str(rank))


FOUND = {  # what rank 0 prints, and the exit status of both
    "fail_to_configure": ("error on rank 1: cannot\n", 2),  # rank 0 has found no such thing
    "fail_alike": ("error: the loss is not finite\n", 1),
    "fail_in_agreement": ("error on rank 1: depth=-1: must be positive\n", 2),
    "exit_quietly": ("error: rank 1 ended with exit status 3\n", 3),
    "fail_oddly": ("error on rank 1: Odd: (its text cannot be shown)\nTraceback", 1),
    "fail_differently": ("error on rank 1: of rank 1\n", 2),  # it was the first
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FOUND)
def test_what_ranks_find_is_said_once(scenario: str) -> None:
    text, status = FOUND[scenario]
    first, second = played(scenario, 1)
    assert (first.returncode, second.returncode) == (status, status)
    assert first.stderr == text or (text.endswith("Traceback") and first.stderr.startswith(text))
    assert first.stderr.count("Traceback") == text.count("Traceback")
    assert second.stderr == ""


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


def test_who_holds_up_the_others() -> None:
    """By how many waits each rank has entered, whether it waits, and whether it answers."""

    def said(*beats: Beat) -> str:
        return hang(beats, 60)

    def waits(entered: int, location: str = "x") -> Beat:
        return Beat(9, entered, True, location)

    def works(entered: int, location: str, **others: bool) -> Beat:
        return Beat(9, entered, False, location, **others)

    line = "{} did not come within timeout_s=60 s: {}; the others wait at x"
    assert said(waits(5), works(4, "y")) == line.format("rank 1", "it is at y")
    assert said(works(4, "y"), waits(5), works(5, "z")) == line.format("rank 0", "it is at y"), (
        "rank 2 is past that wait"
    )
    assert said(works(4, "y"), waits(5), works(4, "z")) == line.format(
        "ranks 0, 2", "rank 0 is at y"
    )
    silent = "it no longer answers (stopped, or its host is down); it was last at y"
    assert said(waits(5), works(5, "y", answers=False)) == line.format("rank 1", silent)
    assert said(waits(5), works(5, "y", answers=False, has_left=True)) == line.format(
        "rank 1", "it has ended already"
    )
    assert (
        said(waits(5), waits(4, "y"))
        == "the ranks wait for each other for longer than timeout_s=60 s: rank 0 at x; rank 1 at y"
    )


def test_a_place_is_the_innermost_line_of_ours() -> None:
    frames: list[str] = []
    # through the standard library and back
    json.loads("[1]", parse_int=lambda _: frames.append(location_of(sys._getframe())))
    assert re.fullmatch(r"tests/utils/ranks/test_watch.py:\d+ in <lambda>", frames[0])
