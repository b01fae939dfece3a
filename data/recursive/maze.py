"""Mazes: their characters and tokens, shortest paths, a generator that tries many boards at once,
and the score of answers.

A maze is a square of cells, one row of tokens (N, cells). Steps go down, left, right and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Prediction, Report
from utils.measure.metrics import format_metrics

CHARACTERS = "# SGo"  # a character's token is its place, from 1 on
PAD, WALL, FREE, START, GOAL, PATH = range(6)
LONGEST_SIDE = 64  # the generator keeps a row of cells in the bits of a number
BOARDS_AT_ONCE = 2048  # boards that the generator tries at once
CARVED_AT_ONCE = 64  # those with one path: nearly each of them is long enough
WALLS = (77, 129)  # of 256 cells, drawn anew for each board: 30 to 50 %
LOOKS = 8  # steps between two checks of which boards go on
MANY = 32  # goals in a board that is always kept


@dataclass(frozen=True)
class Reached:
    """The distances found by a search from one cell; -1 for cells that it did not reach."""

    distance: list[int]
    parent: list[int]

    def path_to(self, cell: int) -> list[int]:
        """Returns the cells of a shortest path, both ends included."""
        path = [cell]
        while self.distance[path[-1]]:
            path.append(self.parent[path[-1]])
        return path[::-1]


def search(tokens: np.ndarray, start: int) -> Reached:
    """Searches breadth first, down, left, right and up, and keeps the first parent, as the
    published mazes were solved.
    """
    cells, beside = len(tokens), neighbours(round(len(tokens) ** 0.5))
    free = (tokens != WALL).tolist()
    distance, parent = [-1] * cells, [-1] * cells
    distance[start] = 0
    queue = [start]
    for cell in queue:  # which grows while it is read
        for other in beside[cell]:
            if free[other] and distance[other] < 0:
                distance[other], parent[other] = distance[cell] + 1, cell
                queue.append(other)
    return Reached(distance, parent)


@cache
def neighbours(side: int) -> list[list[int]]:
    """Returns those cells below, left, right and above each cell that exist, in this order."""
    lists = []
    for cell in range(side * side):
        row, column = divmod(cell, side)
        around = []
        if row < side - 1:
            around.append(cell + side)
        if column > 0:
            around.append(cell - 1)
        if column < side - 1:
            around.append(cell + 1)
        if row > 0:
            around.append(cell - side)
        lists.append(around)
    return lists


@cache
def square_symmetries(side: int) -> np.ndarray:
    """Returns the source of each cell in a square's eight turns and reflections (8, cells); the
    first is the square itself.
    """
    square = np.arange(side * side).reshape(side, side)
    return np.stack(
        [np.rot90(flipped, turns) for flipped in (square, square[:, ::-1]) for turns in range(4)]
    ).reshape(8, -1)


def solve(tokens: np.ndarray) -> np.ndarray | None:
    """Returns the maze with a shortest path in it, or None if no path leads to the goal."""
    start, goal = _ends(tokens)
    found = search(tokens, start)
    return None if found.distance[goal] < 0 else _with_path(tokens, found.path_to(goal))


def solve_all(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns 1 for each maze with a path, else 0, and the mazes with a shortest path; zeros
    without one.
    """
    counts, answers = np.zeros(len(inputs), np.int64), np.zeros_like(inputs)
    for number, tokens in enumerate(inputs):
        if (answer := solve(tokens)) is not None:
            counts[number], answers[number] = 1, answer
    return counts, answers


def _with_path(tokens: np.ndarray, path: list[int]) -> np.ndarray:
    answer = tokens.copy()
    answer[path[1:-1]] = PATH
    return answer


def cut(
    inputs: np.ndarray, labels: np.ndarray, longest: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mazes in which pieces of the path take its place, each with its own start and goal:
    half of the mazes have pieces of `longest` cells, the others shorter ones, down to three.

    Parts of a shortest path are shortest. The gaps are as long as the pieces, so that each start is
    nearest to its own goal.
    """
    inputs = np.where((inputs == START) | (inputs == GOAL), FREE, inputs)
    answers = inputs.copy()
    for maze, answer, label in zip(inputs, answers, labels, strict=True):
        path = path_of(label)
        most = min(longest, len(path))
        piece = most if rng.random() < 0.5 else int(rng.integers(min(3, most), most + 1))
        # as many pieces as fit, with gaps between them, from a random place on
        pieces = (len(path) + piece) // (2 * piece)
        first = int(rng.integers(len(path) - (2 * pieces - 1) * piece + 1))
        for begin in range(first, first + 2 * pieces * piece, 2 * piece):
            cells = path[begin : begin + piece]
            answer[cells] = PATH
            for tokens in (maze, answer):
                tokens[cells[0]], tokens[cells[-1]] = START, GOAL
    return inputs, answers


def path_of(label: np.ndarray) -> list[int]:
    """Returns the cells of the marked path, from start to goal."""
    # each marked cell has one marked neighbour that was not visited yet
    ahead = set(np.flatnonzero((label == PATH) | (label == GOAL)).tolist())
    beside, path = neighbours(round(len(label) ** 0.5)), [int((label == START).argmax())]
    while ahead:
        path.append(next(cell for cell in beside[path[-1]] if cell in ahead))
        ahead.remove(path[-1])
    return path


def is_square(cells: int) -> bool:
    return round(cells**0.5) ** 2 == cells


def is_maze(inputs: np.ndarray, labels: np.ndarray) -> bool:
    """True for mazes with their answers, not for other data with as many tokens."""
    if not len(inputs) or not is_square(inputs.shape[1]):
        return False
    ends = all(((inputs == end).sum(1) == 1).all() for end in (START, GOAL))
    in_range = (inputs >= WALL).all() and (inputs <= GOAL).all()
    return bool(ends and in_range and keeps_maze(inputs, labels).all())


def keeps_maze(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns for each cell whether an answer leaves it as it is, or marks a free one."""
    return (answers == inputs) | ((inputs == FREE) & (answers == PATH))


def leads(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """True for answers that mark one shortest path of their maze, and change nothing else."""
    # a second search sees marked cells alone: the marks must lead through, and mark
    # nothing else
    kept = keeps_maze(inputs, answers).all(1)
    shortest = np.array([_steps(maze) for maze in inputs])
    through = np.array([_steps(maze) for maze in np.where(answers == FREE, WALL, answers)])
    # no shorter way exists, so this one needs all marked cells
    return kept & (through >= 0) & ((answers == PATH).sum(1) == shortest - 1)


def _ends(tokens: np.ndarray) -> tuple[int, int]:
    return int((tokens == START).argmax()), int((tokens == GOAL).argmax())


def _steps(tokens: np.ndarray) -> int:
    """Returns the steps from start to goal, or -1."""
    start, goal = _ends(tokens)
    return search(tokens, start).distance[goal]


def generate(
    side: int, min_path: int, seed: int, chunk: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the mazes among the random boards of a chunk, with their answers: the shortest path
    must have `min_path` cells, both ends included.

    A board with few goals that are far enough is kept with a small probability, as if its goal were
    drawn blindly.
    """
    rng = np.random.default_rng([seed, chunk])
    # walls at random, more on some boards than on others
    open_cells = rng.integers(0, 256, (BOARDS_AT_ONCE, side * side), np.uint8) >= rng.integers(
        *WALLS, (BOARDS_AT_ONCE, 1), np.uint8
    )
    starts = rng.integers(0, side * side, BOARDS_AT_ONCE)
    open_cells[np.arange(BOARDS_AT_ONCE), starts] = True
    mazes = []
    # most boards have no path so long: the fast search drops them before the slow one
    for board in _reaching(open_cells, starts, side, min_path - 1):
        tokens = np.where(open_cells[board], np.uint8(FREE), np.uint8(WALL))
        found = search(tokens, int(starts[board]))
        goals = [cell for cell, far in enumerate(found.distance) if far >= min_path - 1]
        if rng.random() < len(goals) / MANY:
            mazes.append(_maze(tokens, found, goals, rng))
    return mazes


def generate_unique(
    side: int, min_path: int, seed: int, chunk: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns mazes of one path each, with their answers: between any two free cells there is only
    one. Paths have `min_path` cells or up to 4/3 of the side more, all lengths equally likely.
    """
    rng = np.random.default_rng([seed, chunk])
    mazes = []
    for _ in range(CARVED_AT_ONCE):
        tokens = carved(side, rng)
        # lengths are drawn first, so that long paths are as frequent as short ones
        far = min_path - 1 + int(rng.integers(side * 4 // 3 + 1))
        found = search(tokens, int(rng.choice(np.flatnonzero(tokens == FREE))))
        if goals := [cell for cell, distance in enumerate(found.distance) if distance == far]:
            mazes.append(_maze(tokens, found, goals, rng))
    return mazes


def carved(side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a board whose free cells form a tree: a random walk opens every second row and column
    and the walls between them, and goes back where all is open.
    """
    # depth-first: the walk is its own stack, and jumps two cells so that walls stay between
    # passages
    tokens = np.full(side * side, WALL, np.uint8)
    last = side - 2 + side % 2  # the wall beyond the walk; an even side has one more
    walk = [side + 1]
    tokens[walk] = FREE
    while walk:
        row, column = divmod(walk[-1], side)
        inside = {side: row + 2 < last, -side: row > 2, 1: column + 2 < last, -1: column > 2}
        steps = [
            step for step, fits in inside.items() if fits and tokens[walk[-1] + 2 * step] == WALL
        ]
        if not steps:
            walk.pop()
            continue
        step = steps[rng.integers(len(steps))]
        tokens[[walk[-1] + step, walk[-1] + 2 * step]] = FREE
        walk.append(walk[-1] + 2 * step)
    return tokens


def _maze(
    tokens: np.ndarray, found: Reached, goals: list[int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a maze to one of these goals, and its answer."""
    path = found.path_to(goals[rng.integers(len(goals))])
    tokens[path[0]], tokens[path[-1]] = START, GOAL
    return tokens, _with_path(tokens, path)


def _reaching(open_cells: np.ndarray, starts: np.ndarray, side: int, steps: int) -> np.ndarray:
    """Returns the boards that have cells this far from the start. All boards are searched at once,
    a row of cells in the bits of a number.
    """
    word, bits = (np.uint32, 32) if side <= 32 else (np.uint64, 64)
    # a row of cells is one number, so that a step over all boards is a few shifts
    padded = np.zeros((len(starts), side, bits), bool)
    padded[:, :, :side] = open_cells.reshape(-1, side, side)
    passable = np.packbits(padded, axis=2, bitorder="little").view(word)[:, :, 0]
    reached = np.zeros_like(passable)
    board, bit = np.arange(len(passable)), word(1)
    reached[board, starts // side] = np.left_shift(bit, (starts % side).astype(word))
    for step in range(1, steps + 1):
        # a step to the right, to the left, down and up, as far as there are no walls
        wider = reached | (reached << bit) | (reached >> bit)
        wider[:, 1:] |= reached[:, :-1]
        wider[:, :-1] |= reached[:, 1:]
        wider &= passable
        # now and then, boards in which nothing new was reached are left out
        if step % LOOKS == 0 or step == steps:
            going = (wider != reached).any(1)
            board, passable, wider = board[going], passable[going], wider[going]
        reached = wider
    return board


class MazePaths:
    """The share of answers that mark a shortest path: a maze often has several, and its file names
    one.
    """

    scalars = ("path_valid",)

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" in prediction.outputs:
            inputs, answers = (
                rows[: len(indices)].cpu().numpy()
                for rows in (batch["inputs"], prediction.outputs["answer"])
            )
            self._found.append(torch.from_numpy(leads(inputs, answers)))

    def rows(self) -> dict[str, Tensor]:
        return {"valid": torch.cat(self._found)} if self._found else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        metrics = {"path_valid": float(rows["valid"].double().mean())}
        return Report(metrics, line=format_metrics(metrics))
