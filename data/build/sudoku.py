"""Build a Sudoku dataset: generated boards with a unique solution, or boards from CSV files
(source,question,answer,rating).

python -m data.build.sudoku --size 6 --output-dir data/sudoku-6
python -m data.build.sudoku --size 9 --blanks 56 --min-guesses 1 --output-dir data/sudoku-search
python -m data.build.sudoku --hub sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 \
    --output-dir data/sudoku-extreme-1k
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import numpy as np

from data.build.common import new_folder, whole, write_puzzles
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
from data.recursive.puzzle_text import tokens_of
from data.recursive.sudoku import BLANK, BOXES, DIGITS, is_solved
from data.recursive.sudoku_boards import generate, spoil, sudoku_split
from utils.errors import exit_status

# by size: hard, but nearly every board can lose so many
BLANKS = {4: 9, 6: 23, 9: 50, 16: 140}
SIZES = {size * size: size for size in BOXES}


def parse_rows(file: str, rows: Iterable[Row], min_difficulty: int | None) -> Boards:
    """Turns rows into boards of digits. An error names the line."""
    lines, questions, answers = collect(file, rows, min_difficulty, SIZES.get, "16, 36, 81 or 256")
    # a character without a meaning is token 0
    inputs = tokens_of("sudoku", questions)
    labels = tokens_of("sudoku", answers)
    # the answer must be a solved board that keeps every digit of its question
    size = SIZES[inputs.shape[1]]
    in_range = (np.minimum(inputs, labels) > 0) & (np.maximum(inputs, labels) <= size + BLANK)
    check(file, lines, in_range.all(1), f"has characters other than 1 to {DIGITS[size]}, 0 and .")
    check(file, lines, is_solved(labels - BLANK, size), "has an answer that is not a solved board")
    kept = (inputs == BLANK) | (inputs == labels)
    check(file, lines, kept.all(1), "has an answer that contradicts its question")
    return inputs - BLANK, labels - BLANK


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a line about it."""
    check_options(options, "blanks", "min_guesses")
    with new_folder(options.output_dir) as folder:
        if options.size is None:
            boards = convert(options, parse_rows)
            write_list(folder, boards)  # as they are published
            size = SIZES[boards["test"][0].shape[1]]
        else:
            size = options.size
            blanks = BLANKS[size] if options.blanks is None else options.blanks
            counts = generated_counts(options)
            parts = generate(
                size, (*counts.values(),), blanks, options.seed, options.min_guesses or 0
            )
            boards = dict(zip(counts, parts, strict=True))
        if options.impossible:
            boards["test"] = spoil(*boards["test"], size, options.seed)
        # only training boards have images
        splits = {
            name: sudoku_split(
                name, size, *part, options.num_aug if name == "train" else 0, options.seed
            )
            for name, part in boards.items()
        }
        write_puzzles(folder, splits, ["<blank>"])
    return summary(options.output_dir, splits, boards, "boards")


def parser() -> argparse.ArgumentParser:
    hub = "sapientinc/sudoku-extreme"
    options = puzzle_parser(
        "sudoku", __doc__, hub, type=int, choices=sorted(BOXES), help="generate boards of this size"
    )
    options.add_argument(
        "--num-aug",
        type=whole(0),
        default=0,
        help="random symmetric images of every training board",
    )
    options.add_argument(
        "--blanks",
        type=int,
        help=f"blank cells of a generated board, by default {BLANKS} by size",
    )
    options.add_argument(
        "--min-guesses",
        type=whole(0),
        help="generated boards for which a search guesses at least so often",
    )
    options.add_argument(
        "--impossible",
        action="store_true",
        help="change a clue of each test board so that it has no solution; leave others out",
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
