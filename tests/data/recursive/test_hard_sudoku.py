"""Sudoku boards that need search."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data.build import workers as progress
from data.recursive import sudoku_hard
from data.recursive.puzzles import PuzzleSource
from data.recursive.sudoku import generate, is_solved, random_solutions, search, to_digits, to_masks
from tests.data.recursive.helpers import is_minimal
from tests.data.recursive.test_sudoku import build, hashes
from tests.ranks import ROOT
from tests.sources import opened

# a build that says when its processes have told of a board
LONG = """
import sys
from data.build import hard_sudoku, sudoku

if __name__ == "__main__":
    show, said = hard_sudoku.show, []
    def listen(text):
        if not text.startswith("0 of") and not said:
            said.append(print("told", flush=True))
        show(text)
    hard_sudoku.show = listen
    sys.exit(sudoku.main(sys.argv[1:]))
"""


def test_hard_boards_are_unique_and_can_lack_no_digit():
    puzzles, answers, guesses = sudoku_hard.hard_boards(9, 6, 2, 0, 0)
    assert len(puzzles) == 6
    assert is_solved(answers, 9).all()
    assert ((puzzles == answers) | (puzzles == 0)).all()
    found = search(to_masks(puzzles, 9), 9, limit=2)
    assert (found.counts == 1).all()
    assert (found.guesses == guesses).all()
    assert guesses.min() >= 2
    assert all(map(is_minimal, puzzles)), "a digit is not needed"


def test_walks_lead_to_harder_boards():
    walks = sudoku_hard.Walks(9, 12, np.random.default_rng(1))
    first = np.full(12, -1)
    for _ in range(110):
        before = walks.guesses.sum(axis=1)
        walks.step(walks.go_on())
        after = walks.guesses.sum(axis=1)
        assert (after >= before).all()
        first = np.where((before < 0) & (after >= 0), after, first)
    assert first.min() >= 0
    assert (walks.guesses.sum(axis=1) > first).mean() > 0.3
    # what is recorded is what most images of the board take
    made = walks.middling(np.arange(12))
    assert (made.guesses >= np.median(walks.guesses, axis=1)).all()
    assert (search(to_masks(made.puzzles, 9), 9, limit=2).guesses == made.guesses).all()


def test_boards_that_differ_by_names_of_digits_are_alike():
    boards = random_solutions(5, 9, np.random.default_rng(0))
    renamed = np.random.default_rng(1).permutation(9).astype(np.uint8)[boards - 1] + 1
    assert (sudoku_hard.relabel_digits(boards, 9) == sudoku_hard.relabel_digits(renamed, 9)).all()
    assert len(np.unique(sudoku_hard.relabel_digits(boards, 9), axis=0)) == 5
    assert (sudoku_hard.relabel_digits(boards, 9)[:, :9] == np.arange(9)).all()


def test_hard_datasets_are_the_same_by_any_number_of_processes(tmp_path, capsys):
    arguments = (
        "--size",
        9,
        "--hard",
        "--train",
        3,
        "--test",
        1,
        "--min-guesses",
        1,
        "--num-aug",
        1,
    )
    for name, workers in (("a", 1), ("b", 2)):
        assert build(tmp_path / name, *arguments, "--workers", workers) == 0
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    ratings = np.load(tmp_path / "a" / "train" / "all__ratings.npy")
    inputs = np.load(tmp_path / "a" / "train" / "all__inputs.npy")
    assert (search(to_masks(inputs[::2] - 1, 9), 9, limit=2).guesses == ratings).all()
    assert ratings.min() >= 1
    said = capsys.readouterr().out
    assert "6 training examples of 3 boards, 1 test boards, 9x9, " in said
    assert " guesses in the median, " in said
    assert (
        opened(
            PuzzleSource,
            seed=0,
            shards=1,
            global_batch_size=2,
            epochs=4,
            data_path=str(tmp_path / "a"),
        ).spec.vocab_size
        == 11
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", 6), "--hard: makes boards of size 9"),
        (("--size", 9, "--blanks", 50), "and no --blanks"),
        (("--size", 9, "--min-guesses", 0), "--min-guesses 0: a hard board takes at least one"),
        (("--size", 9, "--train", 0), "train=0 test=1000"),
        (("--size", 9, "--workers", 0), "--workers 0"),
    ],
)
def test_hard_boards_that_cannot_be_made_are_refused(tmp_path, capsys, options, message):
    assert build(tmp_path / "out", "--hard", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_search_for_harder_boards_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sudoku_hard, "PATIENCE", 1)
    assert (
        build(
            tmp_path,
            "--hard",
            "--size",
            9,
            "--train",
            2,
            "--test",
            1,
            "--min-guesses",
            5000,
            "--workers",
            1,
        )
        == 2
    )
    assert (
        "--min-guesses 5000: only 0 of 3 boards found; ask for fewer guesses"
        in capsys.readouterr().err
    )


def test_a_search_that_takes_too_long_promises_nothing():
    ((puzzles, _),) = generate(9, (6,), 54, seed=3, min_guesses=2)
    found = search(to_masks(puzzles, 9), 9, limit=2)
    enough, short = (
        search(to_masks(puzzles, 9), 9, limit=2, most_guesses=most)
        for most in (found.guesses.max(), found.guesses.min() - 1)
    )
    assert (enough.counts == found.counts).all()
    assert (is_solved(to_digits(found.solutions), 9)).all()
    assert (short.counts == 2).all()
    assert (short.guesses <= found.guesses).all()
    assert short.guesses.sum() < found.guesses.sum()


def told_slowly(task: int) -> int:
    """A task that tells of two pieces, and then takes longer than a pause between two looks."""
    progress.tell(2)
    time.sleep(0.4)
    return task


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tasks_tell_how_far_they_are_before_they_end(monkeypatch, workers):
    monkeypatch.setattr(progress, "LISTEN", 0.1)
    heard: list[int] = []
    results = progress.in_order(told_slowly, [(1,), (2,)], workers, heard.append)
    assert next(results) == 1
    assert heard[-1] >= 2, "the first result does not wait for the last, and news come before it"
    assert [*results] == [2]
    assert heard == sorted(heard)
    assert heard[-1] == 4
    progress.tell(1)  # nobody listens any more
    assert heard[-1] == 4


def test_sigterm_ends_the_work_as_an_exception():
    with pytest.raises(SystemExit) as ended, progress._exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_killed_build_leaves_nothing_behind(tmp_path, number, status):
    options = ("--size", "9", "--hard", "--workers", "2", "--output-dir", str(tmp_path / "out"))
    with subprocess.Popen(
        [sys.executable, "-c", LONG, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "told\n"
        begun = time.monotonic()
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == status, errors
    assert time.monotonic() - begun < 20, "waits for no board"
    assert "leaked" not in errors
    assert not (tmp_path / "out").exists()


def test_progress_is_told_without_a_terminal_too(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress, "_said_at", 100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for second in range(0, 31, 3):
        clock[0] = 100.0 + second
        progress.show(f"{second} of 30 boards")
    progress.shown()
    assert capsys.readouterr().err == "12 of 30 boards\n24 of 30 boards\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress.show("1 of 2")
    progress.show("2 of 2")
    progress.shown()
    assert capsys.readouterr().err == "\r1 of 2 \r2 of 2 \n"
