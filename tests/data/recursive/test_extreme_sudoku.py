"""Sudoku boards with the difficulty of Sudoku-Extreme's."""

import shutil

import numpy as np
import pytest

from data.recursive import sudoku_extreme
from data.recursive.sudoku import is_solved, random_solutions, search, to_masks
from data.recursive.sudoku_extreme import IMAGES, UNIT, Walk
from data.recursive.sudoku_sets import cell_permutations
from tests.data.recursive.helpers import is_minimal
from tests.data.recursive.test_sudoku import build, hashes

NATIVE = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
OUT_OF_REACH = 30.0


def walks(count: int, seed: int = 0) -> list[Walk]:
    rng = np.random.default_rng(seed)
    return [Walk(answer, rng) for answer in to_masks(random_solutions(count, 9, rng), 9).T]


def test_levels_follow_the_distribution():
    wanted = sudoku_extreme.wanted_levels(400, np.random.default_rng(0))
    assert np.allclose(np.quantile(wanted, [0.25, 0.5, 0.75]), [2.66, 6.54, 7.15], atol=0.1)
    assert wanted.max() <= 7.89
    assert abs(np.corrcoef(wanted, np.arange(400))[0, 1]) < 0.2, "each part has all of them"
    few = [sudoku_extreme.wanted_levels(2, np.random.default_rng(seed)) for seed in range(50)]
    assert np.ptp([max(pair) for pair in few]) > 1, "a few boards are not always the same share"


@NATIVE
def test_walks_lead_to_harder_boards_that_can_lack_no_digit():
    for walk in walks(2):
        first = walk.level
        for _ in range(2):
            before = walk.level
            assert not walk.reaches(OUT_OF_REACH, 30)
            puzzle, answer = walk.puzzle, walk.answer
            assert is_solved(answer[None], 9).all()
            assert ((puzzle == answer) | (puzzle == 0)).all()
            assert is_minimal(puzzle)
            assert walk.level >= before
        assert walk.level > first


@NATIVE
def test_guesses_are_those_of_the_search_and_levels_their_logarithms():
    for walk in walks(3, seed=1):
        walk.reaches(OUT_OF_REACH, 60)
        images = walk.puzzle[walk.state["image"].astype(int)]
        found = search(to_masks(images, 9), 9, limit=2)
        assert (walk.image_guesses() == found.guesses).all()
        level = np.log2(1 + found.guesses[:IMAGES]).mean()
        assert level > 1
        assert level - 1 / UNIT < walk.level <= level + 1e-9


@NATIVE
def test_a_walk_ends_when_images_that_do_not_lead_it_are_hard_enough():
    def level_of_checks(walk: Walk) -> float:
        return float(np.log2(1 + walk.image_guesses()[IMAGES:]).mean())

    wanted = 2.5
    walk, slow = walks(1)[0], walks(1)[0]
    assert walk.reaches(wanted, 400)
    assert min(walk.level, level_of_checks(walk)) > wanted - 1 / UNIT
    for _ in range(400):  # steps one by one are the same steps, and none before was enough
        if (slow.state["given"] == walk.state["given"]).all():
            break
        assert min(slow.level, level_of_checks(slow)) < wanted + 1 / UNIT
        slow.reaches(OUT_OF_REACH, 1)
    assert (slow.state["given"] == walk.state["given"]).all()


@NATIVE
def test_a_race_begins_again_where_no_walk_arrives(monkeypatch):
    monkeypatch.setattr(sudoku_extreme, "ROUNDS", (2, 3))
    monkeypatch.setattr(sudoku_extreme, "WALKS", 2)
    begun = []
    begin = Walk.__init__
    monkeypatch.setattr(Walk, "__init__", lambda *args: (begun.append(1), begin(*args))[1])
    won = sudoku_extreme.race(3.5, np.random.default_rng(0))
    assert len(begun) > 2
    assert len(begun) % 2 == 0
    assert won.level >= 3.5


@NATIVE
def test_boards_depend_on_their_number_alone(monkeypatch):
    told = []
    wanted = np.array([0, 2.5, 3.2, 2])
    whole = sudoku_extreme.extreme_boards(wanted, 3, 0, told.append)
    assert told == [1] * 4
    parts = [sudoku_extreme.extreme_boards(wanted[at : at + 2], 3, at) for at in (0, 2)]
    for mine, split in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(mine, np.concatenate(split))
    assert is_solved(whole.answers, 9).all()
    assert all(map(is_minimal, whole.puzzles))
    assert (search(to_masks(whole.puzzles, 9), 9, limit=2).guesses == whole.guesses).all()
    other = sudoku_extreme.extreme_boards(wanted, 4, 0)
    assert (other.puzzles != whole.puzzles).any(axis=1).all()


@pytest.mark.slow
@NATIVE
@pytest.mark.timeout(1800)
def test_boards_are_as_hard_as_wanted():
    wanted = np.linspace(2, 7, 6)
    made = sudoku_extreme.extreme_boards(wanted, 0, 0)
    image = cell_permutations(9, 6 * 16, np.random.default_rng(0))
    puzzles = np.take_along_axis(np.repeat(made.puzzles, 16, axis=0), image, axis=1)
    guesses = search(to_masks(puzzles, 9), 9, limit=2).guesses
    levels = np.log2(1 + guesses).reshape(6, 16).mean(axis=1)
    assert np.corrcoef(levels, wanted)[0, 1] > 0.9
    assert abs(np.median(levels - wanted)) < 0.5


@NATIVE
def test_datasets_are_the_same_by_any_number_of_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sudoku_extreme, "LEVELS", (0, 2, 3))
    extreme = ("--size", 9, "--hard", "extreme", "--train", 5, "--test", 2, "--seed", 1)
    assert build(tmp_path / "a", *extreme, "--workers", 1) == 0
    monkeypatch.setattr("data.build.hard_sudoku.FEW", 2)
    assert build(tmp_path / "b", *extreme, "--workers", 1) == 0
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert " guesses in the median, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-guesses", 30), "--min-guesses 30: --hard extreme draws the guesses"),
        (("--blanks", 50), "and no --blanks"),
        (("--test", 0), "train=1000 test=0"),
    ],
)
def test_boards_that_cannot_be_made_are_refused(tmp_path, capsys, options, message):
    assert build(tmp_path / "out", "--size", 9, "--hard", "extreme", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_a_compiler_the_option_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sudoku_extreme, "loaded", lambda: None)
    assert build(tmp_path / "out", "--size", 9, "--hard", "extreme") == 2
    assert "--hard extreme: needs a C compiler" in capsys.readouterr().err
