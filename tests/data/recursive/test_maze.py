"""Mazes against a naive search, the builder's line from nothing or from tables, and what
evaluations say of paths.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.build.maze import images
from data.recursive.maze import (
    CHARACTERS,
    GOAL,
    PATH,
    START,
    WALL,
    MazePaths,
    cut,
    generate,
    generate_unique,
    is_maze,
    leads,
    search,
    solve,
)
from data.recursive.puzzle_text import puzzle_text
from data.recursive.sudoku_boards import sudoku_split
from tests.data.helpers import built, reported, write_table
from tests.data.recursive.helpers import source

SMALL = [maze for chunk in range(4) for maze in generate(8, 16, 3, chunk)]


def tokens(*rows: str) -> np.ndarray:
    return np.array([CHARACTERS.index(character) + 1 for character in "".join(rows)], np.uint8)


def text(cells: np.ndarray) -> str:
    return "".join(CHARACTERS[cell - 1] for cell in cells)


def naive_distances(maze: np.ndarray, start: int) -> np.ndarray:
    """By relaxing every cell until nothing changes."""
    side = round(len(maze) ** 0.5)
    far = np.full((side + 2, side + 2), 10**6)
    far[1 + start // side, 1 + start % side] = 0
    free = (maze != WALL).reshape(side, side)
    while True:
        around = [far[2:, 1:-1], far[:-2, 1:-1], far[1:-1, 2:], far[1:-1, :-2]]
        nearer = np.minimum(far[1:-1, 1:-1], np.minimum.reduce(around) + 1)
        nearer = np.where(free, nearer, 10**6)
        if (nearer == far[1:-1, 1:-1]).all():
            return nearer.reshape(-1)
        far[1:-1, 1:-1] = nearer


@pytest.mark.parametrize("longest", [3, 7, 64])
def test_pieces_of_a_path_are_what_the_search_finds(longest: int) -> None:
    inputs, labels = (np.stack(part) for part in zip(*SMALL, strict=True))
    cut_inputs, cut_labels = cut(inputs, labels, longest, np.random.default_rng(0))
    lengths = set()
    for maze, answer, whole in zip(cut_inputs, cut_labels, labels, strict=True):
        marked = []
        goals = np.flatnonzero(maze == GOAL).tolist()
        for start in np.flatnonzero(maze == START).tolist():
            found = search(maze, start)
            path = found.path_to(min(goals, key=lambda goal: found.distance[goal]))
            marked += path[1:-1]
            lengths.add(len(path))
        assert sorted(marked) == np.flatnonzero(answer == PATH).tolist()
        assert ((answer == maze) | (answer == PATH)).all()
        assert ((maze == WALL) == (whole == WALL)).all()
        assert (whole[marked] == PATH).all()
    assert min(lengths) == 3
    assert min(longest, 20) <= max(lengths) <= longest


def test_generated_mazes_are_what_was_asked_for() -> None:
    assert len(SMALL) > 20
    for maze, answer in SMALL:
        start, goal = int((maze == START).argmax()), int((maze == GOAL).argmax())
        far = naive_distances(maze, start)
        assert np.where(far < 10**6, far, -1).tolist() == search(maze, start).distance
        assert far[goal] >= 15
        assert (answer == PATH).sum() == far[goal] - 1
        assert leads(maze[None], answer[None])[0]
        assert np.array_equal(solve(maze), answer)
    walls = np.mean([(maze == WALL).mean() for maze, _ in generate(40, 40, 0, 0)])
    assert 0.25 < walls < 0.45, "sides beyond 32 take wider numbers"


def shortest_paths(maze: np.ndarray) -> int:
    """Counts them by adding up, cell by cell, those that lead to it."""
    start, goal = int((maze == START).argmax()), int((maze == GOAL).argmax())
    side, far = round(len(maze) ** 0.5), naive_distances(maze, start)
    paths = np.zeros((side + 2, side + 2), np.int64)
    paths[1 + start // side, 1 + start % side] = 1
    for cell in sorted(range(len(maze)), key=lambda cell: far[cell]):
        row, column = 1 + cell // side, 1 + cell % side
        for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            before = (row + down - 1) * side + column + right - 1
            inside = 0 < row + down <= side and 0 < column + right <= side
            if inside and far[before] == far[cell] - 1 < 10**6:
                paths[row, column] += paths[row + down, column + right]
    return int(paths[1 + goal // side, 1 + goal % side])


@pytest.mark.parametrize("side", [12, 15])
def test_unique_mazes_have_one_shortest_path(side: int) -> None:
    assert any(shortest_paths(maze) > 1 for maze, _ in SMALL)
    mazes = generate_unique(side, 20, 3, 0)
    lengths = set()
    for maze, answer in mazes:
        assert shortest_paths(maze) == 1
        assert leads(maze[None], answer[None])[0]
        lengths.add(int((answer == PATH).sum()) + 2)
    assert (min(lengths), max(lengths)) == (20, 20 + side * 4 // 3)
    assert len(mazes) > 40
    free = (maze != WALL).reshape(side, side)
    used = side - 1 + side % 2
    assert not free[:: used - 1].any(), "there are walls all around"
    assert not free[:, :: used - 1].any()
    assert free[1:used:2, 1:used:2].all(), "every cell of the walk is open"


def test_of_several_shortest_paths_the_published_one_is_marked() -> None:
    maze = tokens("S   ", "    ", "    ", "   G")
    assert text(solve(maze)) == "S   o   o   oooG", "down comes first"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (("Soo", " #o", "  G"), True),
        (("S  ", "o# ", "ooG"), True),
        (("Soo", " # ", "  G"), False),
        (("Soo", "o#o", "ooG"), False),
        (("So ", " #o", "o G"), False),
        (("Soo", " oo", "  G"), False),
        (("ooo", " #o", "  G"), False),
        (("S  ", " # ", "  G"), False),
        (("Soo", "  o", "  G"), False),
    ],
)
def test_an_answer_leads_or_not(answer: tuple[str, ...], right: bool) -> None:
    maze = tokens("S  ", " # ", "  G")
    assert leads(maze[None], tokens(*answer)[None])[0] == right
    for image, turned in zip(images(maze[None]), images(tokens(*answer)[None]), strict=True):
        assert leads(image[None], turned[None])[0] == right
    assert len({image.tobytes() for image in images(tokens("S# ", "   ", "  G")[None])}) == 8


def test_what_is_a_maze_is_seen() -> None:
    inputs, labels = (np.stack(part) for part in zip(*SMALL, strict=True))
    assert is_maze(inputs, labels)
    boards = np.array([[1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]], np.uint8)
    sudoku = sudoku_split("x", 4, np.where(np.arange(16) < 6, boards, 0), boards, 0, 0).sets["all"]
    assert not is_maze(sudoku.inputs, sudoku.labels)
    assert not is_maze(inputs[:0], labels[:0])
    assert not is_maze(inputs[:, :-1], labels[:, :-1])


def test_no_test_maze_is_an_image_of_a_training_maze(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--size 8 --min-path 16 --train 30 --test 10 --seed 5"
    built(tmp_path / "set", "maze", *line.split())
    assert "30 training examples of 30 mazes, 10 test mazes, 8x8" in capsys.readouterr().out
    assert MazePaths in [type(one) for one in source(tmp_path / "set").evaluators("all")]
    train = {image.tobytes() for image in images(np.load(tmp_path / "set/train/all__inputs.npy"))}
    assert not train & {maze.tobytes() for maze in np.load(tmp_path / "set/test/all__inputs.npy")}
    assert len(train) == 30 * 8


def test_published_tables_become_sets(tmp_path: Path) -> None:
    mazes = [(text(maze), text(answer), (answer == PATH).sum() + 2) for maze, answer in SMALL]
    write_table(tmp_path / "csv", "train", mazes[5:])
    write_table(tmp_path / "csv", "test", mazes[:5])
    options = ["--augment", "--subsample-size", "4", "--min-difficulty", "17"]
    built(tmp_path / "set", "maze", "--input-dir", tmp_path / "csv", *options)
    inputs = np.load(tmp_path / "set/train/all__inputs.npy")
    assert len(inputs) == 8 * 4
    assert {tuple(row) for row in inputs[::8]} <= {tuple(maze) for maze, _ in SMALL[5:]}
    assert leads(inputs, np.load(tmp_path / "set/train/all__labels.npy")).all()
    said = json.loads((tmp_path / "set/test/dataset.json").read_text())
    assert (said["vocab_size"], said["seq_len"]) == (6, 64)


def test_evaluations_count_every_shortest_path() -> None:
    inputs, labels = (np.stack(part) for part in zip(*SMALL, strict=True))
    answers = labels.astype(np.int64)
    for row, maze in enumerate(inputs):  # solved with other neighbours first
        found = solve(np.ascontiguousarray(maze.reshape(8, 8).T).reshape(-1))
        assert found is not None
        answers[row] = found.reshape(8, 8).T.reshape(-1)
    other = next(row for row in range(5, len(inputs)) if (answers[row] != labels[row]).any())
    answers[:5, 0] = 0
    for size in (7, len(inputs)):
        batches = []
        for start in range(0, len(inputs), size):
            rows = np.arange(start, min(start + size, len(inputs)))
            padded = torch.from_numpy(np.concatenate([answers[rows], np.zeros((3, 64), int)]))
            given = torch.from_numpy(inputs[rows].astype(np.int32))
            batches.append((rows, {"inputs": given}, {"answer": padded}))
        share = pytest.approx(1 - 5 / len(inputs))
        assert reported(MazePaths(), *batches).metrics == {"path_valid": share}
    assert reported(MazePaths()).metrics == {}
    shown = puzzle_text(inputs[other], labels[other], answers[other], 6)
    assert shown.endswith("another shortest path than the recorded one (where they differ: x)")
    assert puzzle_text(inputs[other], labels[other], labels[other], 6).endswith("correct")
