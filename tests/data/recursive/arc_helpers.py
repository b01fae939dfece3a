"""Made-up ARC tasks as folders, and made-up answers to a set of them."""

import json
from pathlib import Path

import numpy as np

DIHEDRAL = [
    lambda grid: grid,
    lambda grid: np.rot90(grid, 1),
    lambda grid: np.rot90(grid, 2),
    lambda grid: np.rot90(grid, 3),
    np.fliplr,
    np.flipud,
    np.transpose,
    lambda grid: np.fliplr(np.rot90(grid, 1)),
]


def task(
    rng: np.random.Generator, shown: int, asked: int, most: int = 30
) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Grids of any sizes up to this."""
    grid = lambda: rng.integers(0, 10, rng.integers(1, most + 1, 2)).tolist()  # noqa: E731
    return {
        name: [{"input": grid(), "output": grid()} for _ in range(count)]
        for name, count in (("train", shown), ("test", asked))
    }


def write_folder(folder: Path, names: str, seed: int, most: int = 30) -> dict[str, dict]:
    """A task for each letter, with one to three pairs that ask."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tasks = {
        f"task_{name}": task(rng, int(rng.integers(1, 4)), 1 + number % 3, most)
        for number, name in enumerate(names)
    }
    for name, content in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tasks


def tokens(grid: np.ndarray, down: int = 0, right: int = 0) -> np.ndarray:
    """A grid on its canvas, cell by cell."""
    canvas = np.zeros((30, 30), np.uint8)
    height, width = grid.shape
    for i in range(height + 1):
        for j in range(width + 1):
            if i + down < 30 and j + right < 30 and (i < height or j < width):
                canvas[i + down, j + right] = 1 if i == height or j == width else grid[i, j] + 2
    return canvas.reshape(-1)


def meaning(name: str) -> tuple[str, int, np.ndarray]:
    """The puzzle, the symmetry and the colour map that a name of TRM's layout stands for."""
    puzzle, *rest = name.split("|||")
    if not rest:
        return puzzle, 0, np.arange(10)
    return puzzle, int(rest[0][1:]), np.array([*map(int, rest[1])])


def answers(folder: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """To each test example a right answer, or one of several wrong ones, and how surely it
    halts.
    """
    rng = np.random.default_rng(seed)
    identifiers = json.loads((folder / "identifiers.json").read_text())
    puzzles = json.loads((folder / "test_puzzles.json").read_text())
    given, wanted = [], {}
    for one in np.load(folder / "test" / "all__puzzle_identifiers.npy"):
        name, symmetry, colours = meaning(identifiers[one])
        for number, pair in enumerate(puzzles[name]["test"]):
            grid = np.array(pair["output"])
            # how often the answer is right depends on the pair: some are solved by the first vote,
            # others late or never
            share = wanted.setdefault((name, number), rng.choice([0.0, 0.15, 0.2, 0.3, 0.6]))
            if rng.random() > share:
                wrong = np.random.default_rng([number, int(rng.geometric(0.25))])
                grid = wrong.integers(0, 10, wrong.integers(1, 9, 2))
            given.append(tokens(DIHEDRAL[symmetry](colours[grid])))
            if rng.random() < 0.1:
                given[-1] = rng.integers(0, 14, 900).astype(np.uint8)  # what no net should answer
    return np.stack(given), rng.normal(0, 2, len(given)).astype(np.float32)
