"""All ranks fail together, with the failing rank's own error first, and stop together when asked:
real processes, disturbed.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.utils.ranks.crew import SCRIPT, Crew, environment
from tests.utils.ranks.ranks_watch import TIMEOUT_S
from utils.ranks.watch import Beat, hang, location_of


def assert_one_line(crew: Crew, rank: int, line: str) -> None:
    """This rank says it and nobody says anything else."""
    numbers = range(len(crew.processes))
    assert [crew.err(number) for number in numbers] == [
        line if number == rank else "" for number in numbers
    ]


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_all_and_is_all_there_is_to_read(failing: int) -> None:
    with Crew(3, "fail", str(failing)) as crew:
        crew.until("ready")
        assert crew.end(20) == [1, 1, 1]  # three processes beside other tests
        first, second, *_, last = crew.err(0).splitlines()
        assert first == f"error on rank {failing}: ZeroDivisionError: cannot"
        assert second == "Traceback (most recent call last):"
        assert last == "ZeroDivisionError: cannot"
        assert crew.errors() == crew.err(0)


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


@pytest.mark.parametrize(
    ("scenario", "killed"), [("forever", 0), pytest.param("fork", 1, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_is_named(scenario: str, killed: int) -> None:
    with Crew(3, scenario, str(killed)) as crew:
        crew.until("ready")
        time.sleep(0.3)
        crew.signal(killed, signal.SIGKILL)
        assert crew.end(5) == [-9 if rank == killed else 1 for rank in range(3)]
        assert_one_line(
            crew,
            1 if killed == 0 else 0,
            f"error: rank {killed} is gone (killed, or its host is down)\n",
        )


def test_a_rank_that_hangs_is_named_and_where_it_is() -> None:
    with Crew(3, "hang", "0") as crew:
        crew.until("ready")
        began = time.monotonic()
        assert crew.end(TIMEOUT_S + 5) == [1, 1, 1]
        assert time.monotonic() - began > TIMEOUT_S - 0.5
        source = Path(SCRIPT).read_text().splitlines()
        here = re.escape("tests/utils/ranks/ranks_watch.py")
        pattern = (
            rf"error: rank 0 did not come within timeout_s=3 s: it is at {here}:(\d+) in stuck; "
        )
        match = re.fullmatch(
            pattern + rf"the others wait at {here}:(\d+) in together\n", crew.errors()
        )
        assert match, crew.errors()
        assert [source[int(line) - 1].strip() for line in match.groups()] == [
            "time.sleep(1)",
            "dist.barrier()",
        ]


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


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ([(1, "SIGTERM"), (1, "SIGTERM")], "SIGTERM"),
        pytest.param([(0, "SIGUSR1")], "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_asked_and_all_stop_after_the_same_step(
    sent: list[tuple[int, str]], asked: str
) -> None:
    with Crew(3 if asked == "SIGTERM" else 2, "stop", "0") as crew:
        crew.until("deferred")
        for rank, name in sent:
            crew.signal(rank, getattr(signal, name))
        assert crew.end(6) == [{"SIGTERM": 143, "SIGUSR1": 138}[asked]] * len(crew.processes)
        step = crew.out(0).split()[-1]
        assert {crew.out(rank).split()[-1] for rank in range(len(crew.processes))} == {step}
        assert_one_line(crew, 0, f"{asked}: saved step {step}\n")


@pytest.mark.slow
def test_ctrl_c_on_one_rank_ends_all_at_once_the_second_time() -> None:
    with Crew(2, "ignore", "-1") as crew:
        crew.until("deferred")
        crew.signal(1, signal.SIGINT)
        time.sleep(1.3)
        crew.signal(1, signal.SIGINT)
        assert crew.end(5) == [130, 130]
        assert_one_line(crew, 0, "error: rank 1 was stopped at once by Ctrl-C\n")


@pytest.mark.slow
def test_a_signal_before_training_ends_all() -> None:
    with Crew(2, "start_slowly", "-1") as all_stopped, Crew(2, "start_slowly", "-1") as one_stopped:
        all_stopped.until("ready")
        one_stopped.until("ready")
        all_stopped.signal(0, signal.SIGTERM)
        all_stopped.signal(1, signal.SIGTERM)
        one_stopped.signal(1, signal.SIGTERM)
        line = "stopped by SIGTERM before training began\n"
        assert all_stopped.end(3) == [143, 143]
        assert_one_line(all_stopped, 0, line)
        assert one_stopped.end(8) == [143, 143]
        assert_one_line(one_stopped, 0, f"error: rank 1 was {line}")


LAUNCHER = """
import os, subprocess, sys, time
for rank in range(2):
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, **numbers})
time.sleep(600)
"""
BY_HAND = ["-c", LAUNCHER]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SUBREAPER = 36  # of prctl: orphans become this process's children, which may then wait for them


@contextmanager
def orphans(launcher: Sequence[str], scenario: str, output: Path) -> Iterator[list[int]]:
    """Two ranks whose launcher is killed as soon as they train."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    pids: list[int] = []
    with output.open("wb") as out:
        command = [sys.executable, *launcher, SCRIPT, scenario, "-1"]
        process = subprocess.Popen(command, env=environment(2), cwd=ROOT, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 40
        while output.read_text().count("deferred") < 2:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        pids += [int(pid) for pid in re.findall(r"ready (\d+)", output.read_text())]
        process.kill()
        process.wait()
        yield pids
    finally:
        process.kill()
        process.wait()
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        ctypes.CDLL(None).prctl(SUBREAPER, 0)


def statuses(pids: Sequence[int], limit: float) -> list[int]:
    """How they ended, within the limit."""
    deadline, status_of = time.monotonic() + limit, {}
    while len(status_of) < len(pids):
        assert time.monotonic() < deadline, f"{len(pids) - len(status_of)} still run"
        for pid in set(pids) - set(status_of):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                status_of[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return list(status_of.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="waits for orphans as Linux allows")
@pytest.mark.parametrize("launcher", [BY_HAND, TORCHRUN], ids=["killed", "torchrun"])
def test_ranks_whose_launcher_is_killed_save_and_stop(launcher: list[str], tmp_path: Path) -> None:
    with orphans(launcher, "stop", tmp_path / "out") as pids:
        assert statuses(pids, 8) == [143, 143]
        text = (tmp_path / "out").read_text()
        assert re.search(
            r"torchrun, which started rank [01], is gone: saving, then stopping\nstops"
            r" after|\nstops after",
            text,
        )
        assert text.count("is gone") == 1, text
        assert re.search(r"SIGTERM: saved step \d+\n$", text), text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="waits for orphans as Linux allows")
def test_ranks_whose_launcher_is_killed_and_who_cannot_stop_end_after_the_timeout(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    with orphans(BY_HAND, "ignore", tmp_path / "out") as pids:
        assert statuses(pids, TIMEOUT_S + 9) == [143, 143]
        assert time.monotonic() - began > TIMEOUT_S
        assert (tmp_path / "out").read_text().count("is gone") == 1


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
