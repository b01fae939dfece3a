"""Build a Sudoku dataset: generated boards with a unique solution, or boards from CSV files (source,question,answer,rating).

python -m data.build.sudoku --size 6 --output-dir data/sudoku-6
python -m data.build.sudoku --size 9 --hard --train 1000 --test 1000 --output-dir data/sudoku-hard
python -m data.build.sudoku --hub sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 --output-dir data/sudoku-extreme-1k
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.build.common import Parser, check_output, write_dataset
from data.build.hard_sudoku import SIZE as HARD_SIZE
from data.build.hard_sudoku import hard_parts
from data.sudoku import BOXES, DIGITS, generate, is_solved
from data.sudoku_sets import sudoku_split
from utils.errors import ConfigError, brief, exit_status

COLUMNS = ("question", "answer", "rating")
BLANKS = {4: 9, 6: 23, 9: 50, 16: 140}  # by size: hard enough to be interesting, and nearly every board can lose so many
GUESSES = 20  # of a hard board, at least
SIZES = {size * size: size for size in BOXES}

Row = tuple[int, Any, Any, Any]  # line number, then COLUMNS
Boards = tuple[np.ndarray, np.ndarray]  # puzzles and answers as digits


def parse_rows(file: str, rows: Iterable[Row], min_difficulty: int | None) -> Boards:
    """Check rows and turn them into boards; what is wrong is named with its line."""
    lines, questions, answers = [], [], []
    cells = 0
    for line, question, answer, rating in rows:
        if not cells and len(question) in SIZES:
            cells = len(question)
        if not len(question) == len(answer) == cells:
            expected = cells or "16, 36, 81 or 256"
            raise ConfigError(f"{file}: line {line} has {len(question)} and {len(answer)} cells, not {expected}; correct or remove it")
        try:
            difficulty = int(rating)
        except ValueError:
            raise ConfigError(f"{file}: line {line} has rating={brief(rating)}, not a whole number; correct or remove it") from None
        if min_difficulty is None or difficulty >= min_difficulty:
            lines.append(line)
            questions.append(question)
            answers.append(answer)
    if not lines:
        wanted = "" if min_difficulty is None else f" of --min-difficulty {min_difficulty} or more"
        raise ConfigError(f"{file}: holds no boards{wanted}; give another file or a lower --min-difficulty")
    puzzles, solutions = _digits(questions, cells), _digits(answers, cells)
    given = puzzles > 0
    size = SIZES[cells]
    _check(file, lines, ((puzzles <= size) & (solutions <= size)).all(axis=1), f"has characters other than 1 to {DIGITS[size]}, 0 and .")
    _check(file, lines, is_solved(solutions, size), "has an answer that is no solved board")
    _check(file, lines, (~given | (puzzles == solutions)).all(axis=1), "has an answer that contradicts its question")
    return puzzles, solutions


def _digits(boards: list[str], cells: int) -> np.ndarray:
    """Digits of equally long strings, A to G above 9; what is none becomes a large number."""
    codes = np.frombuffer("".join(boards).upper().encode("ascii", "replace"), np.uint8).reshape(-1, cells)
    digits = np.full(256, 255, np.uint8)
    digits[list(DIGITS.encode())] = np.arange(len(DIGITS))
    digits[ord(".")] = 0
    return digits[codes]


def _check(file: str, lines: list[int], good: np.ndarray | np.bool_, problem: str) -> None:
    if not good.all():
        raise ConfigError(f"{file}: line {lines[int((~good).argmax())]} {problem}; correct or remove it")


def read_csv(path: Path) -> Iterator[Row]:
    """The rows of a file with their line numbers."""
    if not os.path.isfile(path):
        raise ConfigError(f"--input-dir {path.parent}: no {path.name} there; give a folder that holds train.csv and test.csv")
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            if missing := [name for name in COLUMNS if name not in header]:
                raise ConfigError(f"{path}: line 1 lacks the column {missing[0]}; it should be source,question,answer,rating")
            places = [header.index(name) for name in COLUMNS]
            for row in reader:
                if len(row) != len(header):
                    raise ConfigError(f"{path}: line {reader.line_num} has {len(row)} fields, not {len(header)}; correct or remove it")
                yield reader.line_num, row[places[0]], row[places[1]], row[places[2]]
        except (csv.Error, OSError) as error:
            raise ConfigError(f"{path}: line {reader.line_num} cannot be read ({error}); correct or remove it") from None


def read_hub(name: str, split: str) -> Iterator[Row]:
    """The rows of a dataset on the hub, or in a folder that `datasets` understands."""
    from datasets import Features, Value, load_dataset

    # answers are digits only: without types they would be read as (far too large) numbers
    features = Features({column: Value("string") for column in ("source", *COLUMNS)})
    try:
        rows = load_dataset(name, split=split, features=features)
    except Exception as error:  # whatever the hub's client raises, the user's way out is the same
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--hub {name}: split {split} cannot be loaded ({reason}); download the CSV files and use --input-dir") from None
    for start in range(0, len(rows), 10_000):
        part = rows[start : start + 10_000]
        for place, (question, answer, rating) in enumerate(zip(*(part[column] for column in COLUMNS), strict=True)):
            yield start + place + 2, question or "", answer or "", rating or ""  # as lines of a CSV file, below its header


def convert(options: argparse.Namespace) -> tuple[int, dict[str, Boards]]:
    """The size and the boards of both splits; only training boards are subsampled."""
    boards = {}
    for split in ("train", "test"):
        file = Path(options.input_dir) / f"{split}.csv" if options.input_dir else None
        rows = read_csv(file) if file else read_hub(options.hub, split)
        boards[split] = parse_rows(str(file or f"{options.hub} {split}"), rows, options.min_difficulty)
    cells, test_cells = boards["train"][0].shape[1], boards["test"][0].shape[1]
    if cells != test_cells:
        raise ConfigError(f"test boards have {test_cells} cells, training boards {cells}; give files of one size")
    wanted = options.subsample_size
    puzzles, answers = boards["train"]
    if wanted is not None and wanted > len(puzzles):
        raise ConfigError(f"--subsample-size {wanted}: there are only {len(puzzles)} boards; ask for fewer")
    if wanted is not None:
        chosen = np.random.default_rng(options.seed).choice(len(puzzles), wanted, replace=False)
        boards["train"] = puzzles[chosen], answers[chosen]
    return SIZES[cells], boards


def build(options: argparse.Namespace) -> str:
    """Make the dataset; returns what was made, in one line."""
    folder = Path(options.output_dir)
    check_output(folder)
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: must not be negative; try {-options.seed}")
    ratings = None
    if options.input_dir or options.hub:
        size, boards = convert(options)
    elif options.hard:
        if options.size != HARD_SIZE or options.blanks is not None:
            raise ConfigError(f"--hard: makes boards of size {HARD_SIZE} that can lack no digit; give --size {HARD_SIZE}, and no --blanks")
        least = GUESSES if options.min_guesses is None else options.min_guesses
        hard = hard_parts((options.train, options.test), least, options.seed, options.workers)
        size, boards = HARD_SIZE, {name: (part.puzzles, part.answers) for name, part in zip(("train", "test"), hard, strict=True)}
        ratings = {name: part.guesses for name, part in zip(boards, hard, strict=True)}
    else:
        size = options.size
        blanks = BLANKS[size] if options.blanks is None else options.blanks
        parts = generate(size, (options.train, options.test), blanks, options.seed, options.min_guesses or 0)
        boards = {"train": parts[0], "test": parts[1]}
    splits = {name: sudoku_split(name, size, *boards[name], options.num_aug if name == "train" else 0, options.seed) for name in boards}
    write_dataset(folder, splits, ["<blank>"], ratings)
    train, test = (len(splits[name].sets["all"].inputs) for name in ("train", "test"))
    return f"{folder}: {train} training examples of {len(boards['train'][0])} boards, {test} test boards, {size}x{size}{_rated(ratings)}"


def _rated(ratings: Mapping[str, np.ndarray] | None) -> str:
    if ratings is None:
        return ""
    guesses = np.concatenate([*ratings.values()])
    return f", {np.median(guesses):.0f} guesses in the median, {guesses.min()} to {guesses.max()}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(prog="data.build.sudoku", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output-dir", required=True, help="folder of the dataset; an earlier dataset there is replaced")
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--size", type=int, choices=sorted(BOXES), help="generate boards of this size")
    source.add_argument("--input-dir", help="folder that holds train.csv and test.csv")
    source.add_argument("--hub", help="a dataset's name on the hub, such as sapientinc/sudoku-extreme")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--num-aug", type=int, default=0, help="random symmetric images of every training board")
    generated = made.add_argument_group("generated boards")
    generated.add_argument("--train", type=int, default=1000, help="training boards")
    generated.add_argument("--test", type=int, default=1000, help="test boards")
    generated.add_argument("--blanks", type=int, help=f"blank cells per board, by default {BLANKS} by size")
    generated.add_argument("--min-guesses", type=int, help=f"only boards for which a search has to guess as often; with --hard {GUESSES}")
    generated.add_argument("--hard", action="store_true", help="boards that need search and can lack no digit, found step by step")
    generated.add_argument("--workers", type=int, help="processes for --hard; by default one a core")
    converted = made.add_argument_group("converted boards")
    converted.add_argument("--subsample-size", type=int, help="training boards to keep, chosen at random")
    converted.add_argument("--min-difficulty", type=int, help="drop boards with a smaller rating")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 and one line about what is wrong."""
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
