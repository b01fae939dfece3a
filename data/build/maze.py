"""Build a maze dataset: generated mazes, or mazes from CSV files (source,question,answer,rating) of
the characters `# SGo`.

python -m data.build.maze --size 30 --output-dir data/maze-30
python -m data.build.maze --hub sapientinc/maze-30x30-hard-1k --output-dir data/maze-30x30-hard-1k
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import count

import numpy as np

from data.build.common import new_folder, progress, whole, write_puzzles
from data.build.rows import (
    Boards,
    Row,
    check,
    check_options,
    collect,
    convert,
    generated_counts,
    puzzle_parser,
    summary,
    write_list,
)
from data.recursive.maze import (
    BOARDS_AT_ONCE,
    CHARACTERS,
    GOAL,
    LONGEST_SIDE,
    START,
    generate,
    generate_unique,
    is_square,
    leads,
    square_symmetries,
)
from data.recursive.puzzle_files import plain_split
from data.recursive.puzzle_text import tokens_of
from utils.errors import ConfigError, exit_status

PATIENCE = 1 << 20  # boards without a single maze
IMAGES = 8  # turns and reflections of a square


def fits(cells: int) -> bool:
    return cells > 1 and is_square(cells)


def parse_rows(file: str, rows: Iterable[Row], min_difficulty: int | None) -> Boards:
    """Turns rows into tokens. An error names the line."""
    # cells first, then ends, then the path: each check relies on those before it
    lines, questions, answers = collect(file, rows, min_difficulty, fits, "a square number")
    inputs = tokens_of("maze", questions)
    labels = tokens_of("maze", answers)
    check(
        file,
        lines,
        ((inputs > 0) & (inputs <= GOAL)).all(1),
        "has a question with characters other than #, space, S and G",
    )
    # a path needs exactly one start and one goal
    for token, name in ((START, "S"), (GOAL, "G")):
        check(
            file,
            lines,
            (inputs == token).sum(1) == 1,
            f"does not have exactly one {name} in its question",
        )
    check(
        file,
        lines,
        leads(inputs, labels),
        "has an answer that is not the question with a shortest path of o",
    )
    return inputs, labels


def images(grids: np.ndarray) -> np.ndarray:
    """Returns every square (N, cells), followed by its turns and reflections."""
    return grids[:, square_symmetries(round(grids.shape[1] ** 0.5))].reshape(-1, grids.shape[1])


def make(options: argparse.Namespace) -> dict[str, Boards]:
    """Generates mazes for both splits, none of which is an image of another."""
    side = options.size
    counts = generated_counts(options)
    wanted = sum(counts.values())
    # grows with the size: for 30, 110 cells, or 101 where a maze has one path alone
    usual = side * 10 // 3 + 1 if options.unique else round(side * 11 / 3)
    min_path = usual if options.min_path is None else options.min_path
    drawn = generate_unique if options.unique else generate
    if not 2 <= min_path <= side * side:
        raise ConfigError(
            f"--min-path {min_path}: a path in a maze of size {side} has 2 to {side * side} cells;"
            " choose one of these"
        )
    kept: dict[bytes, Boards] = {}  # by one image of each
    with progress(wanted, "maze") as bar:
        for chunk in count():
            # the smallest of its eight images names a maze: of those that turn into each other, the
            # first is kept
            for maze in drawn(side, min_path, options.seed, chunk):
                kept.setdefault(min(image.tobytes() for image in images(maze[0][None])), maze)
            bar.update(min(len(kept), wanted) - bar.n)
            if len(kept) >= wanted:
                break
            # where there is one maze, there are more, however long it takes
            if not kept and chunk * BOARDS_AT_ONCE >= PATIENCE:
                raise ConfigError(
                    f"--min-path {min_path}: none of {PATIENCE:,} boards of size {side} has a path"
                    " that long; ask for a shorter one"
                )
    # splits in the order in which mazes were found, which is random
    ends = np.cumsum([*counts.values()])
    parts = [
        np.split(np.stack(part), ends[:-1]) for part in zip(*[*kept.values()][:wanted], strict=True)
    ]
    return dict(zip(counts, zip(*parts, strict=True), strict=True))


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a line about it."""
    check_options(options, "min_path", "unique")
    with new_folder(options.output_dir) as folder:
        boards = make(options) if options.size is not None else convert(options, parse_rows)
        vocab_size = 1 + len(CHARACTERS)
        splits = {
            name: plain_split(name, vocab_size, *part, copies=1) for name, part in boards.items()
        }
        if options.augment:
            inputs, labels = map(images, boards["train"])
            splits["train"] = plain_split("train", vocab_size, inputs, labels, IMAGES)
        write_puzzles(folder, splits, ["<blank>"])
        if options.size is None:
            write_list(folder, boards)
    return summary(options.output_dir, splits, boards, "mazes")


def parser() -> argparse.ArgumentParser:
    options = puzzle_parser(
        "maze",
        __doc__,
        "sapientinc/maze-30x30-hard-1k",
        type=whole(1, LONGEST_SIDE),
        help=f"generate mazes of this many rows and columns, at most {LONGEST_SIDE}",
    )
    options.add_argument(
        "--augment", action="store_true", help="training mazes in all eight turns and reflections"
    )
    options.add_argument(
        "--min-path",
        type=int,
        help="cells of a generated path, ends included; by default 11/3 of the size, 110 for 30",
    )
    options.add_argument(
        "--unique",
        action="store_true",
        default=None,
        help="mazes with one path alone, of 101 to 141 cells for size 30",
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
