"""All ranks fail together, with the failing rank's own error first, and stop together when asked:
real processes, disturbed.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import ExitStack

import pytest

from tests.utils.ranks.crew import Crew
from tests.utils.ranks.ranks_watch import TIMEOUT_S
from utils.ranks.watch import Beat, hang, location_of


def assert_one_line(crew: Crew, rank: int, line: str) -> None:
    """This rank says it and nobody says anything else."""
    numbers = range(len(crew.processes))
    assert [crew.err(number) for number in numbers] == [
        line if number == rank else "" for number in numbers
    ]


@pytest.mark.slow
def test_what_ranks_find_is_said_once() -> None:
    cases = {  # what rank 0 prints, and the exit status of both
        "fail_to_configure": ("error on rank 1: cannot\n", 2),  # rank 0 has found no such thing
        "fail_alike": ("error: the loss is not finite\n", 1),
        "fail_alike_unexpectedly": ("error: ZeroDivisionError: cannot\nTraceback", 1),
        "fail_in_agreement": ("error on rank 1: depth=-1: must be positive\n", 2),
        "exit_quietly": ("error: rank 1 ended with exit status 3\n", 3),
        "fail_oddly": ("error on rank 1: Odd: (its text cannot be shown)\nTraceback", 1),
        "fail_differently": ("error on rank 1: of rank 1\n", 2),  # it was the first
    }
    with ExitStack() as started:
        crews = {scenario: started.enter_context(Crew(2, scenario, "1")) for scenario in cases}
        for scenario, (text, status) in cases.items():
            crews[scenario].until("ready")
            assert crews[scenario].end(20) == [status] * 2, scenario
            if text.endswith("\n"):
                assert_one_line(crews[scenario], 0, text)
            assert crews[scenario].errors().startswith(text)
            assert crews[scenario].errors() == crews[scenario].err(0)
            assert crews[scenario].errors().count("Traceback") == text.count("Traceback")


@pytest.mark.slow
def test_ranks_that_need_nobody_at_the_moment_end_too() -> None:
    with Crew(2, "fail_while_others_compute", "0") as crew:
        crew.until("ready")
        assert crew.end(15) == [1, 1]
        assert [crew.out(rank).splitlines()[1:] for rank in range(2)] == [
            [],
            ["last words: ZeroDivisionError: cannot"],
        ]
        assert crew.errors().startswith("error on rank 0: ZeroDivisionError: cannot\nTraceback")
        assert crew.errors() == crew.err(0)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named() -> None:
    with Crew(2, "forever", "-1") as first, Crew(2, "forever", "-1") as second:
        for absent, crew in enumerate((first, second)):
            crew.until("ready")
            crew.signal(absent, signal.SIGSTOP)
        for absent, crew in enumerate((first, second)):
            assert crew.end(TIMEOUT_S + 5, but=(absent,))[1 - absent] == 1
            line = (
                f"error: rank {absent} did not come within timeout_s=3 s: it no longer answers"
                " (stopped, or its host is down)"
            )
            assert crew.errors().startswith(line)
            assert crew.errors().count("\n") == 1
            crew.signal(absent, signal.SIGCONT)
        for absent, crew in enumerate((first, second)):
            assert crew.end(8)[absent] == 1, "once it goes on, it finds out"


@pytest.mark.slow
def test_a_rank_prints_its_own_error_where_rank_0_does_not_answer() -> None:
    with Crew(2, "fail", "1") as crew:
        crew.until("ready")
        crew.signal(0, signal.SIGSTOP)
        assert crew.end(10, but=(0,))[1] == 1
        assert crew.err(1).startswith("error on rank 1: ZeroDivisionError: cannot\nTraceback")
        assert not re.search("^error: rank 0", crew.err(1), re.MULTILINE)
        crew.signal(0, signal.SIGCONT)
        assert crew.end(8) == [1, 1], "once it goes on, it finds out"


@pytest.mark.slow
def test_a_healthy_run_says_nothing_also_when_ranks_leave_one_by_one() -> None:
    with Crew(3, "leave", "2") as crew:
        assert crew.end(30) == [0, 0, 0]
        assert crew.errors() == ""


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
