import json

import numpy as np
import pytest

from data.build.sudoku import main
from data.recursive.sudoku import (
    BLANK,
    BOXES,
    DIGITS,
    geometry,
    is_solved,
    search,
    to_masks,
)
from data.recursive.sudoku_boards import augment, generate, random_solutions, spoil
from tests.data.helpers import built, everything, files, write_table
from tests.data.recursive.helpers import source
from utils.errors import ConfigError


def peers_allow(board: list[int], cell: int, digit: int, size: int) -> bool:
    """The rules, spelled out."""
    height, width = BOXES[size]
    row, column = divmod(cell, size)
    for other in (place for place, value in enumerate(board) if value == digit):
        r, c = divmod(other, size)
        same_box = r // height == row // height and c // width == column // width
        if r == row or c == column or same_box:
            return False
    return True


def brute_force(board: list[int], size: int) -> int:
    """The number of solutions, by trying everything."""
    if 0 not in board:
        return 1
    cell = board.index(0)
    found = 0
    for digit in range(1, size + 1):
        if peers_allow(board, cell, digit, size):
            found += brute_force([*board[:cell], digit, *board[cell + 1 :]], size)
    return found


def test_solution_counts_equal_brute_force():
    rng = np.random.default_rng(0)
    boards = random_solutions(60, 4, rng)
    blanks = rng.permuted(np.tile(np.arange(16), (60, 1)), axis=1)[:, :11]
    np.put_along_axis(boards, blanks, 0, 1)
    boards[5, np.flatnonzero(boards[5] == 0)[0]] = boards[5].max()  # most likely contradictory
    expected = [min(brute_force(board.tolist(), 4), 50) for board in boards]
    assert len(set(expected)) > 4
    assert search(to_masks(boards, 4), 4, limit=50)[0].tolist() == expected
    assert search(to_masks(np.zeros((1, 16), np.uint8), 4), 4, limit=1000)[0] == 288


@pytest.mark.parametrize(("size", "blanks"), [(4, 9), (6, 23), (9, 45), (16, 110)])
def test_generated_puzzles_are_unique_disjoint_and_have_their_blanks(size, blanks):
    parts = generate(size, (60, 20), blanks, seed=1)
    for puzzles, answers in parts:
        assert ((puzzles == 0).sum(axis=1) == blanks).all()
        assert ((puzzles == answers) | (puzzles == 0)).all()
        units = [sorted(answers[0, unit]) for unit in geometry(size).units]
        assert all(unit == [*range(1, size + 1)] for unit in units)
        assert is_solved(answers, size).all()
        assert (search(to_masks(puzzles, size), size, limit=2)[0] == 1).all()
        if size < 9:
            assert all(brute_force(puzzle.tolist(), size) == 1 for puzzle in puzzles[:10])
    train, test = ({board.tobytes() for board in answers} for _, answers in parts)
    assert not train & test
    assert len({board.tobytes() for puzzles, _ in parts for board in puzzles}) == 80
    broken = parts[0][1].copy()
    broken[:, [0, 1]] = broken[:, [1, 0]]
    assert not is_solved(broken, size).any()


def test_boards_that_need_guesses_need_them():
    for puzzles, answers in generate(9, (12, 5), 54, seed=3, min_guesses=2):
        assert search(to_masks(puzzles, 9), 9, limit=2).guesses.min() >= 2
        assert is_solved(answers, 9).all()
    with pytest.raises(ConfigError, match=r"min_guesses=40: only 0 of 5 .* fewer guesses"):
        generate(4, (5, 5), 9, seed=0, min_guesses=40)


@pytest.mark.parametrize("size", [4, 6, 9, 16])
def test_augmented_boards_are_valid_and_keep_puzzle_and_answer_together(size):
    ((puzzles, answers),) = generate(size, (4,), {4: 8, 6: 20, 9: 40, 16: 90}[size], seed=0)
    images = augment(size, puzzles, answers, 30, seed=0)
    inputs, labels = (tokens.reshape(4, 31, -1) for tokens in images)
    assert (inputs[:, 0] == puzzles + 1).all()
    assert (labels[:, 0] == answers + 1).all()
    assert is_solved(labels.reshape(124, -1) - 1, size).all()
    assert ((inputs == labels) | (inputs == 1)).all()
    assert ((inputs == 1).sum(axis=2) == (puzzles == 0).sum(axis=1)[:, None]).all()
    assert len({board.tobytes() for board in labels[0]}) > 25
    assert (search(to_masks(inputs[0] - 1, size), size, limit=2)[0] == 1).all()


def test_a_built_dataset_is_read_and_equals_the_embedded_one(tmp_path):
    options = "--size 6 --train 30 --test 10 --blanks 20 --num-aug 3 --seed 2"
    folder = built(tmp_path / "out", "sudoku", *options.split())
    keys = {"size": 6, "train": 30, "test": 10, "blanks": 20, "num_aug": 3, "seed": 2}
    both = source(folder), source(embedded=keys)
    assert both[0].spec == both[1].spec
    assert both[0].length.total_steps == 2 * (3 * 30 // 8)  # an epoch is one look at every group
    for step in range(5):
        one, other = (made.train_batch(step, 1)["inputs"] for made in both)
        assert (one == other).all()
    tests = [everything(made.eval_sets()["all"]) for made in both]
    assert (tests[0]["labels"] == tests[1]["labels"]).all()


def test_some_blanks_are_filled_in_for_training_alone():
    embedded = {"size": 6, "train": 64, "test": 16, "blanks": 20, "num_aug": 0, "seed": 2}
    plain, eased = source(embedded=embedded), source(embedded=embedded, revealed=0.5)
    blanks = []
    for step in range(8):
        bare, filled = (made.train_batch(step, 0) for made in (plain, eased))
        assert filled["inputs"].dtype == bare["inputs"].dtype
        assert (filled["labels"] == bare["labels"]).all()
        changed = filled["inputs"] != bare["inputs"]
        assert (bare["inputs"][changed] == BLANK).all()
        assert (filled["inputs"][changed] == filled["labels"][changed]).all()
        blanks += (filled["inputs"] == BLANK).sum(1).tolist()
        again = source(embedded=embedded, revealed=0.5).train_batch(step, 0)
        assert (again["inputs"] == filled["inputs"]).all()
    assert 0.25 < np.mean(np.array(blanks) == 20) < 0.75, "half of the boards stay as they are"
    assert min(blanks) < 18
    assert 15 < np.mean(blanks) < 19
    tests = [everything(made.eval_sets()["all"])["inputs"] for made in (plain, eased)]
    assert (tests[0] == tests[1]).all()


def write_csv(folder, boards: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for split, parts in boards.items():
        rows = []
        for number, both in enumerate(zip(*parts, strict=True)):
            question, answer = ("".join(DIGITS[digit] for digit in board) for board in both)
            rows.append((question if number % 2 else question.replace("0", "."), answer, number))
        write_table(folder, split, rows)


@pytest.fixture
def csv_boards(tmp_path):
    parts = generate(9, (12, 5), 40, seed=0)
    boards = dict(zip(("train", "test"), parts, strict=True))
    write_csv(tmp_path / "csv", boards)
    return boards


def test_csv_files_are_converted(tmp_path, csv_boards):
    options = ("--min-difficulty", 2, "--subsample-size", 6, "--num-aug", 2)
    out = built(tmp_path / "out", "sudoku", "--input-dir", tmp_path / "csv", *options)
    puzzles, answers = csv_boards["test"]
    assert (np.load(out / "test" / "all__inputs.npy") == puzzles[2:] + 1).all()
    assert (np.load(out / "test" / "all__labels.npy") == answers[2:] + 1).all()
    train = np.load(out / "train" / "all__inputs.npy")
    assert train.shape == (18, 81)
    assert train.dtype == np.uint8
    kept = {board.tobytes() for board in train[::3]}
    assert len(kept) == 6
    assert kept <= {board.tobytes() for board in csv_boards["train"][0][2:] + np.uint8(1)}
    assert np.load(out / "train" / "all__group_indices.npy").tolist() == list(range(0, 19, 3))


def test_the_hub_path_gives_the_same_boards(tmp_path, csv_boards, monkeypatch):
    """A local folder stands for the hub: the same code of `datasets` reads both."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    one = built(tmp_path / "a", "sudoku", "--input-dir", tmp_path / "csv")
    assert files(one) == files(built(tmp_path / "b", "sudoku", "--hub", tmp_path / "csv"))


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("precious")
    assert main(["--size", "4", "--output-dir", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_impossible_boards_break_no_rule_and_have_no_solution(tmp_path, csv_boards):
    csv = ("--input-dir", tmp_path / "csv")
    kept, spoiled = (
        built(tmp_path / name, "sudoku", *csv, *options)
        for name, options in (("kept", ()), ("spoiled", ("--impossible",)))
    )
    assert files(kept / "train") == files(spoiled / "train")
    boards = np.load(spoiled / "test" / "all__inputs.npy") - BLANK
    changed = boards != np.load(kept / "test" / "all__inputs.npy") - BLANK
    assert (changed.sum(1) == 1).all()
    assert (boards[changed] > 0).all()
    for board, cell in zip(boards.tolist(), changed.argmax(1).tolist(), strict=True):
        digit, board[cell] = board[cell], 0
        assert peers_allow(board, cell, digit, 9)
    assert (search(to_masks(boards, 9), 9, limit=1).counts == 0).all()

    listed = ("--boards", spoiled / "boards.json", "--impossible")
    assert files(spoiled) == files(built(tmp_path / "again", "sudoku", *csv, *listed))


def test_boards_that_stay_possible_are_left_out():
    """A board of size 4 with one clue has solutions with every other."""
    solved = np.array([[1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]], np.uint8)
    one_clue = np.where(np.arange(16) == 0, solved, 0).astype(np.uint8)
    with pytest.raises(ConfigError, match="the test boards have a solution; give boards with more"):
        spoil(one_clue, solved, 4, seed=0)
    ((puzzles, answers),) = generate(4, (1,), 8, seed=0)
    both = np.concatenate([one_clue, puzzles]), np.concatenate([solved, answers])
    assert (spoil(*both, 4, seed=0)[0] > 0).sum(1).tolist() == [8]


def test_test_boards_that_are_trained_on_are_told(tmp_path, capsys):
    ((puzzles, answers),) = generate(4, (5,), 8, seed=0)
    write_csv(tmp_path / "csv", {"train": (puzzles, answers), "test": (puzzles[3:], answers[3:])})
    built(tmp_path / "out", "sudoku", "--input-dir", tmp_path / "csv")
    assert "4x4; note: 2 test puzzles are in the training set, too" in capsys.readouterr().out
    # also an image of a training board, and a board as often as it is asked
    images = built(tmp_path / "images", "sudoku", "--input-dir", tmp_path / "csv", "--num-aug", 3)
    arrays = [np.load(images / "train" / f"all__{name}.npy") for name in ("inputs", "labels")]
    asked = tuple(np.repeat(array[1:2] - BLANK, 3, 0) for array in arrays)
    write_csv(tmp_path / "csv", {"train": (puzzles, answers), "test": asked})
    built(tmp_path / "asked", "sudoku", "--input-dir", tmp_path / "csv", "--num-aug", 3)
    assert "4x4; note: 3 test puzzles are in the training set, too" in capsys.readouterr().out


def test_training_boards_are_held_out_for_validation(tmp_path, csv_boards):
    options = ("--input-dir", tmp_path / "csv", "--subsample-size", 6, "--num-aug", 2)
    whole = built(tmp_path / "whole", "sudoku", *options)
    out = built(tmp_path / "out", "sudoku", *options, "--validation", 4)
    assert files(out / "train") == files(whole / "train"), "the training boards stay what they are"
    held_out = {tuple(board) for board in np.load(out / "validation" / "all__inputs.npy")}
    assert len(held_out) == 4
    assert held_out <= {tuple(board) for board in csv_boards["train"][0] + 1}
    assert not held_out & {tuple(board) for board in np.load(out / "train" / "all__inputs.npy")}
    for split, boards in (("validation", held_out), ("test", csv_boards["test"][0] + 1)):
        read = everything(source(out, eval_split=split).eval_sets()["all"])["inputs"]
        assert {tuple(board) for board in read} == {tuple(board) for board in boards}


def test_a_dataset_says_which_boards_it_has_and_is_built_again_from_others(
    tmp_path, csv_boards, capsys
):
    options = ("--subsample-size", 6, "--num-aug", 2, "--validation", 4)
    one = built(tmp_path / "one", "sudoku", "--input-dir", tmp_path / "csv", *options)
    more = {split: tuple(part[::-1] for part in parts) for split, parts in csv_boards.items()}
    write_csv(tmp_path / "more", more)
    listed = ("--input-dir", tmp_path / "more", "--boards", one / "boards.json")
    assert files(one) == files(built(tmp_path / "two", "sudoku", *listed, "--num-aug", 2))

    without_test = json.loads((one / "boards.json").read_text())
    del without_test["test"]
    (tmp_path / "list.json").write_text(json.dumps(without_test))
    whole = built(tmp_path / "whole", "sudoku", *listed[:2], "--boards", tmp_path / "list.json")
    assert len(np.load(whole / "test" / "all__inputs.npy")) == len(csv_boards["test"][0])

    write_csv(tmp_path / "few", {name: tuple(p[3:] for p in part) for name, part in more.items()})
    arguments = ["--input-dir", tmp_path / "few", *listed[2:], "--output-dir", tmp_path / "three"]
    assert main([*map(str, arguments)]) == 2
    assert "few/train.csv: lacks 3 of 4 boards that --boards lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["sudoku --size 4 --num-aug 3", "maze --size 8 --min-path 12 --augment"]
)
def test_generated_puzzles_are_held_out(tmp_path, command):
    command += " --train 20 --test 8 --validation 5"
    out = built(tmp_path / "out", *command.split())
    rows = {
        split: {tuple(row) for row in np.load(out / split / "all__inputs.npy")}
        for split in ("train", "test", "validation")
    }
    assert (len(rows["test"]), len(rows["validation"])) == (8, 5)
    assert not rows["validation"] & (rows["train"] | rows["test"])
