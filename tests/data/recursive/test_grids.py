"""A user's own tasks: what the builder makes of JSON lines, and what runs say of answers."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract import IGNORE
from data.recursive.arc import END, FIRST, PAD
from data.recursive.boards import Boards
from data.recursive.grids import MOST_SYMBOLS, SYMBOLS, Task
from data.recursive.own_puzzle import Answers, OwnPuzzles
from tests.data.helpers import built, everything, files, shown
from tests.data.recursive.helpers import source
from tests.data.recursive.test_own_puzzle import answered
from utils.errors import ConfigError

Grid = list[list[int]]


def write(path: Path, pairs: list[tuple[Grid, Grid]], **more: Any) -> Path:
    """A file of these examples."""
    lines = [json.dumps(more | {"input": grid, "output": answer}) for grid, answer in pairs]
    path.write_text("\n".join([*lines, ""]))
    return path


def random_pairs(count: int, rows: int, columns: int, seed: int = 0) -> list[tuple[Grid, Grid]]:
    """Random grids of symbols 0 to 3, and answers that have them upside down."""
    rng = np.random.default_rng(seed)
    grids = rng.integers(0, 4, (count, rows, columns)).tolist()
    return [(grid, grid[::-1]) for grid in grids]


def arrays(folder: Path, split: str = "train") -> dict[str, np.ndarray]:
    return {path.name[5:-4]: np.load(path) for path in (folder / split).glob("*.npy")}


def test_grids_of_one_shape_are_not_padded(tmp_path: Path) -> None:
    train, test = (random_pairs(count, 3, 5, count) for count in (20, 6))
    lines = "--train", write(tmp_path / "a", train), "--test", write(tmp_path / "b", test)
    folder = built(tmp_path / "out", "grids", *lines)
    for split, pairs in (("train", train), ("test", test)):
        found = arrays(folder, split)
        for name, side in (("inputs", 0), ("labels", 1)):
            expected = np.array([pair[side] for pair in pairs]).reshape(-1, 15) + FIRST
            assert found[name].tolist() == expected.tolist()
        assert not found["puzzle_identifiers"].any()
    made = source(folder)
    assert (made.spec.seq_len, made.spec.vocab_size, made.spec.table_rows) == (15, 6, 1)
    marked = b"\xef\xbb\xbf" + (tmp_path / "a").read_bytes()  # a byte order mark
    (tmp_path / "a").write_bytes(marked)
    assert files(folder) == files(built(tmp_path / "again", "grids", *lines))


def test_other_grids_lie_on_a_square_canvas_with_end_tokens(tmp_path: Path) -> None:
    small, large = ([[1, 2]], [[3], [0]]), ([[0, 0, 9]], [[4]])
    lines = write(tmp_path / "a", [small]), write(tmp_path / "b", [large])
    folder = built(tmp_path / "out", "grids", "--train", lines[0], "--test", lines[1])
    train, test = arrays(folder), arrays(folder, "test")
    e, p = END, PAD
    assert train["inputs"].tolist() == [[3, 4, e, e, e, p, p, p, p]]
    assert train["labels"].tolist() == [[5, e, p, 2, e, p, e, p, p]]
    assert test["inputs"].tolist() == [[2, 2, 11, e, e, e, p, p, p]]
    made = source(folder, global_batch_size=2)
    assert (everything(made.eval_sets()["all"])["labels"] == IGNORE).sum() == 6


def cells(*grids: Grid) -> tuple[int, ...]:
    """The cells of these grids, one after the other."""
    return tuple(cell for grid in grids for row in grid for cell in row)


def turned(grid: Grid) -> list[Grid]:
    """All eight images, in any order."""
    flipped = [np.array(grid), np.array(grid)[::-1]]
    return [np.rot90(one, turns).tolist() for one in flipped for turns in range(4)]


def test_symmetries_move_inputs_and_answers_together(tmp_path: Path) -> None:
    pairs = random_pairs(4, 3, 3)
    lines = write(tmp_path / "a", pairs), write(tmp_path / "b", pairs[:1])
    options = "--augment", "--permute", 1, 3, "--num-aug", 40, "--seed", 1
    folder = built(tmp_path / "out", "grids", "--train", lines[0], "--test", lines[1], *options)
    found = arrays(folder)
    assert len(arrays(folder, "test")["inputs"]) == 1
    assert found["group_indices"].tolist() == [0, 328, 656, 984, 1312]
    rows = np.concatenate([found["inputs"], found["labels"]], 1) - FIRST
    for number, pair in enumerate(pairs):
        swapped = [np.array([0, 3, 2, 1])[np.array(grid)].tolist() for grid in pair]
        expected = set()
        for grid, answer in (pair, swapped):
            images = zip(turned(grid), turned(answer), strict=True)
            expected |= {cells(*both) for both in images}
        group = rows[328 * number : 328 * (number + 1)]
        assert tuple(group[0]) == cells(*pair), "the puzzle itself comes first"
        assert {tuple(row) for row in group.tolist()} == expected


def test_a_named_puzzle_has_ids_for_itself_and_its_images(tmp_path: Path) -> None:
    one, other = random_pairs(3, 2, 2, 1), random_pairs(2, 2, 2, 2)
    text = write(tmp_path / "a", one[:2], puzzle="one").read_text()
    text += write(tmp_path / "a", other, puzzle="two").read_text()
    text += write(tmp_path / "a", one[2:], puzzle="one").read_text()
    (tmp_path / "a").write_text(text)
    test = write(tmp_path / "b", random_pairs(1, 2, 2, 3), puzzle="two")
    folder = built(
        tmp_path / "out", "grids", "--augment", "--train", tmp_path / "a", "--test", test
    )
    names = json.loads((folder / "identifiers.json").read_text())
    assert (len(names), names[1], names[9]) == (17, "one", "two")
    assert arrays(folder, "test")["puzzle_identifiers"].tolist() == [9]
    found = arrays(folder)
    assert found["puzzle_identifiers"].tolist() == list(range(1, 17))
    assert np.diff(found["puzzle_indices"]).tolist() == [3] * 8 + [2] * 8
    for first, pairs in ((0, one), (24, other)):  # a puzzle before its images, its pairs together
        rows = found["inputs"][first : first + len(pairs)] - FIRST
        assert [*map(tuple, rows)] == [cells(grid) for grid, _ in pairs]
    assert source(folder).spec.table_rows == 17


def test_pairs_that_are_trained_on_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = random_pairs(5, 3, 3)
    lines = "--train", write(tmp_path / "a", pairs), "--test", write(tmp_path / "b", pairs[3:])
    folder = built(tmp_path / "out", "grids", *lines, "--validation", tmp_path / "b")
    said = "3x3, 4 symbols; note: 2 test puzzles are in the training set, too; note: 2 validation"
    assert said in capsys.readouterr().out
    assert len(source(folder, eval_split="validation").eval_sets()["all"]) == 2


@pytest.fixture(params=[False, True])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    """Grids of 2 rows and 3 columns, or up to that."""
    pairs = random_pairs(20, 2, 3) + (random_pairs(1, 4, 4) if request.param else [])
    lines = write(tmp_path / "a", pairs), write(tmp_path / "b", pairs)
    built(tmp_path / "out", "grids", "--train", lines[0], "--test", lines[1])
    made = source(tmp_path / "out", puzzle="012 301", eval_only=True)
    assert [type(one) for one in made.evaluators("puzzle")] == [Answers, Boards]
    assert made._own is not None
    assert made._own.task is not None
    return made._own.task


def asked(task: Task, *lines: str, path: Path) -> OwnPuzzles:
    path.write_text("\n".join(lines))
    return OwnPuzzles(str(path), "grid", task.rows * task.columns, 0, task)


def test_answers_to_typed_grids_and_to_json_are_judged_by_what_is_given(
    task: Task, tmp_path: Path
) -> None:
    known = json.dumps({"input": [[0, 1, 2], [3, 0, 1]], "output": [[3, 0, 1], [0, 1, 2]]})
    puzzles = asked(task, "012 301", known, known, path=tmp_path / "x")
    right = puzzles.solutions[1].astype(np.int64)
    wrong = right.copy()
    wrong[1] = FIRST + 3
    if task.padded:
        right[-1] = wrong[-1] = FIRST  # beyond the end tokens, nothing counts
    report = answered(puzzles, np.stack([right, right, wrong]))
    assert report.text.split("\n")[:2] == ["3 puzzles: 1 not judged, 1 correct, 1 wrong", "line 1:"]
    table = [line.split(",") for line in report.files["answers.csv"].splitlines()]
    assert [row[1:4] for row in table[1:]] == [
        ["012 301", "301 012", "not judged"],
        ["012 301", "301 012", "correct"],
        ["012 301", "331 012", "wrong"],
    ]
    drawn = answered(asked(task, known, path=tmp_path / "y"), wrong[None]).text.split("\n")
    lines = [line.split() for line in drawn[:3]]
    assert lines == [["puzzle", "answer"], ["0", "1", "2", "3", "3x1"], [*"301012"]]
    assert drawn[3:] == ["wrong (1 cells, marked x)", "confidence 88.1%"]
    scene = json.loads(report.files["boards.scene.json"])
    assert (scene["board"], scene["side"], scene["rows"]) == ("grid", task.columns, task.rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "not a plain file"),
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ({"rows": "x"}, "rows=x: Input should be a valid integer"),
        ({"rows": 4}, "does not fit dataset.json"),
        ({"symbols": 200}, "does not fit dataset.json"),
        ({"ids": {"x": 7}}, "does not fit dataset.json"),
    ],
)
def test_a_damaged_description_is_one_line(change: Any, said: str, tmp_path: Path) -> None:
    lines = write(tmp_path / "a", random_pairs(8, 2, 3))
    folder = built(tmp_path / "out", "grids", "--train", lines, "--test", lines)
    file = folder / "grids.json"
    text = json.dumps(json.loads(file.read_text()) | change) if type(change) is dict else change
    file.unlink()
    os.mkfifo(file) if text is None else file.write_text(text)
    with pytest.raises(ConfigError) as error:
        source(folder).evaluators("all")
    assert str(error.value).startswith(f"{file}: {said}; the dataset is damaged, build or")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("012 30", "rows of different lengths"),
        ("012", "has 1x3 cells and symbol 2; give what training had: 2x3, symbols 0 to 3"),
        ("014 301", "symbol 4"),
        ("grids.jsonl", "is not a grid; write"),
        ('{"input": [[0, 1, 2], [3, 0, 1]], "puzzle": "x"}', "puzzle=x is not in the training"),
    ],
)
def test_wrong_grids_are_named(line: str, said: str, tmp_path: Path) -> None:
    task = Task(2, 3, False, 4, {"<blank>": 0})
    with pytest.raises(ConfigError, match=said) as error:
        OwnPuzzles(line, "grid", 6, 0, task)
    assert str(error.value).startswith("data.puzzle=")


def test_a_pair_of_a_named_puzzle_has_its_id(tmp_path: Path) -> None:
    task = Task(1, 2, False, 3, {"one": 1, "two": 9})
    puzzles = asked(task, '{"puzzle": "two", "input": [[1, 2]]}', path=tmp_path / "x")
    assert puzzles.read(np.arange(1))["puzzle_identifiers"] == 9
    with pytest.raises(ConfigError, match="name one that is"):
        asked(task, "12", path=tmp_path / "x")


def test_an_evaluation_draws_a_grid_and_no_board(tmp_path: Path) -> None:
    """The grids have the shape and as many tokens as a Sudoku."""
    pairs = random_pairs(20, 4, 4)
    lines = write(tmp_path / "a", pairs), write(tmp_path / "b", pairs)
    folder = built(tmp_path / "out", "grids", "--train", lines[0], "--test", lines[1])
    made = source(folder)
    one = {name: rows[0] for name, rows in made.eval_sets()["all"].read(np.arange(1)).items()}
    assert made.spec.vocab_size == 4 + 2
    answer = one["labels"].copy()
    answer[0] = FIRST + (answer[0] - FIRST + 1) % 4
    lines = shown(made, "all", one, answer).split("\n")
    puzzle, right = (np.array(grid) for grid in pairs[0])
    assert lines[0].split() == ["puzzle", "answer"]
    assert lines[2].split() == [*map(str, puzzle[1]), *map(str, right[1])]
    assert lines[-1] == "wrong: 1 of 16 cells (marked x)"


def test_every_symbol_has_a_character() -> None:
    assert len({*SYMBOLS}) == MOST_SYMBOLS
    assert SYMBOLS.isprintable()
