"""The search in C takes the steps of the one in numpy."""

import shutil

import numpy as np
import pytest

from data.recursive import sudoku, sudoku_native
from data.recursive.sudoku import BOXES, FOR_EVER, WIDTH, geometry, random_solutions, to_masks
from data.recursive.sudoku_hard import hard_boards
from tests.data.recursive.test_sudoku import build, hashes

NATIVE = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
BLANKS = {4: (8, 13), 6: (20, 28), 9: (50, 58), 16: (120, 140)}


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku_native, "loaded", lambda: None)


def boards(size: int, blanks: int, count: int) -> np.ndarray:
    """Masks of boards with one solution, several or none."""
    rng = np.random.default_rng([size, blanks])
    puzzles, cells = random_solutions(count, size, rng), size * size
    blank = rng.permuted(np.tile(np.arange(cells), (count, 1)), axis=1)[:, :blanks]
    np.put_along_axis(puzzles, blank, 0, axis=1)
    puzzles[::5, rng.integers(cells)] = rng.integers(1, size + 1)
    masks = to_masks(puzzles, size)
    masks[rng.integers(cells, size=count), np.arange(count)] &= geometry(size).full ^ np.uint16(1)
    masks[3, 1] = 0
    return masks


@NATIVE
@pytest.mark.parametrize("size", BOXES)
def test_counts_guesses_and_solutions_are_those_of_numpy(size, monkeypatch):
    solutions = set()
    for blanks in BLANKS[size]:
        masks = boards(size, blanks, 60 if size < 16 else 20)
        for limit, most, width in (
            (1, FOR_EVER, WIDTH), (2, 60, WIDTH), (3, 4, 40), (7, 30, 25)
        ):  # fmt: skip
            monkeypatch.setattr(sudoku_native, "BOARDS", width)  # returns after every round
            before = masks.copy()
            native = sudoku.search(masks, size, limit, most, width)
            assert (masks == before).all()
            plain = sudoku._searched(masks, geometry(size), limit, most, width)
            for mine, reference in zip(native, plain, strict=True):
                assert mine.dtype == reference.dtype
                assert np.array_equal(mine, reference)
            solutions |= {*native.counts.tolist()}
    assert {0, 1, 2, 3} <= solutions


@NATIVE
def test_where_there_is_a_compiler_the_search_is_compiled():
    assert sudoku_native.loaded() is not None


def test_no_boards_take_no_guesses():
    found = sudoku.search(np.zeros((81, 0), np.uint16), 9, limit=2)
    assert [part.shape for part in found] == [(0,), (0,), (81, 0)]


def test_hard_boards_are_the_same_without_a_compiler(without_compiler, monkeypatch):
    plain = hard_boards(9, 2, 3, 0, 0)
    monkeypatch.undo()
    for mine, reference in zip(hard_boards(9, 2, 3, 0, 0), plain, strict=True):
        assert np.array_equal(mine, reference)


def test_the_builder_says_that_it_is_slower(tmp_path, capsys, without_compiler, monkeypatch):
    hard = ("--size", 9, "--hard", "--train", 1, "--test", 1, "--min-guesses", 1, "--workers", 1)
    assert build(tmp_path / "plain", *hard) == 0
    assert "no C compiler works here" in capsys.readouterr().err
    monkeypatch.undo()
    assert build(tmp_path / "native", *hard) == 0
    assert capsys.readouterr().err == ""
    assert hashes(tmp_path / "plain") == hashes(tmp_path / "native")
