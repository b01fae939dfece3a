"""Published puzzles: `source,question,answer,rating` in CSV files or on the hub.

A dataset of them lists its boards in `boards.json`, by which they are found again among others.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.build.common import Parser, whole
from data.files import load_from_hub
from data.recursive.puzzle_files import PuzzleSplit
from utils.errors import ConfigError, brief
from utils.files import open_plain, read_json

SPLITS = ("train", "test")
GENERATED = 1000  # puzzles of each split
LIST = "boards.json"
LISTED = TypeAdapter(dict[str, list[str]])  # codes of boards by split, in their order

COLUMNS = ("question", "answer", "rating")
Row = tuple[int, str, str, str]  # the line, counted from 1, and the columns
Boards = tuple[np.ndarray, np.ndarray]  # puzzles and answers
# called with a file's name, its rows and the lowest rating to keep
Parse = Callable[[str, Iterable[Row], int | None], Boards]


def convert(options: argparse.Namespace, parse: Parse) -> dict[str, Boards]:
    """Returns the splits, subsampled or chosen as the options say."""
    boards: dict[str, Boards] = {}
    listed = None
    if options.boards is not None:
        listed = read_json(options.boards, LISTED, f"give the {LIST} of a dataset")
        if options.train or options.test or options.validation:
            raise ConfigError(
                f"--boards {options.boards}: sets the numbers of boards; leave other counts out"
            )
    for split in SPLITS:
        if options.input_dir is None:
            rows = f"{options.hub} {split}", read_hub(options.hub, split)
        else:
            file = Path(options.input_dir) / f"{split}.csv"
            rows = str(file), read_csv(file)
        given = parse(*rows, options.min_difficulty)
        if listed is None:
            boards |= subsample(split, given, options)
            continue
        for name in ("train", "validation") if split == "train" else ("test",):
            if name in listed:
                boards[name] = find(rows[0], given, listed[name])
            elif name == "test":  # a list of training boards alone leaves the test whole
                boards[name] = given
    # one net answers both splits, so boards have one size
    cells, test_cells = (boards[split][0].shape[1] for split in SPLITS)
    if cells != test_cells:
        raise ConfigError(
            f"test puzzles have {test_cells} cells, training puzzles {cells}; give files of one"
            " size"
        )
    return boards


def generated_counts(options: argparse.Namespace) -> dict[str, int]:
    """Returns how many puzzles of each split to generate."""
    counts = {split: getattr(options, split) or GENERATED for split in SPLITS}
    return counts | ({"validation": options.validation} if options.validation else {})


def summary(
    folder: Path, splits: Mapping[str, PuzzleSplit], boards: Mapping[str, Boards], kind: str
) -> str:
    """Returns a line about a dataset, with a note on evaluated puzzles that are also trained on."""
    trained = splits["train"]
    sizes = [f"{len(trained.sets['all'].inputs)} training examples of {len(boards['train'][0])}"]
    sizes += [f"{len(boards[split][0])} {split}" for split in splits if split != "train"]
    side = round(trained.metadata.seq_len**0.5)
    counts = ", ".join(f"{size} {kind}" for size in sizes)
    return f"{folder}: {counts}, {side}x{side}{leaks(splits)}"


def leaks(splits: Mapping[str, PuzzleSplit]) -> str:
    """Returns notes on test and validation puzzles that are also trained on, if only as images of
    others.
    """
    notes = ""
    for name, split in splits.items():
        if name != "train":
            asked = Counter(row.tobytes() for row in split.sets["all"].inputs)
            trained_on = splits["train"].sets["all"].inputs
            if shared := sum(asked.pop(row.tobytes(), 0) for row in trained_on):
                notes += f"; note: {shared:,} {name} puzzles are in the training set, too"
    return notes


def read_csv(path: Path) -> Iterator[Row]:
    if not os.path.exists(path):
        raise ConfigError(
            f"--input-dir {path.parent}: no {path.name} there; give a folder that holds train.csv"
            " and test.csv"
        )
    # utf-8-sig: with a byte order mark or without; bytes that are no text fail as cells later, with
    # their line
    open_plain(path).close()
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                question, answer, rating = (row.get(name) or "" for name in COLUMNS)
                yield reader.line_num, question, answer, rating
        except csv.Error as error:
            where = f"{path}: line {reader.line_num + 1}"
            raise ConfigError(f"{where}: {error}; correct or remove it") from None


def read_hub(name: str, split: str) -> Iterator[Row]:
    """Yields the rows of a dataset on the hub, or of a folder that `datasets` reads."""
    from datasets import Features, Value

    # answers are digits only: without types they would be read as (far too large) numbers
    features = Features({column: Value("string") for column in ("source", *COLUMNS)})
    where, remedy = f"--hub {name}: split {split}", "download the CSV files and use --input-dir"
    rows = load_from_hub(where, remedy, name, split, features=features)
    for start in range(0, len(rows), 10_000):
        part = rows[start : start + 10_000]
        for row, (question, answer, rating) in enumerate(
            zip(*(part[column] for column in COLUMNS), strict=True)
        ):
            # counted as the lines of a CSV file are, whose first is its header
            yield start + row + 2, question or "", answer or "", rating or ""


def collect(
    file: str,
    rows: Iterable[Row],
    min_difficulty: int | None,
    fits: Callable[[int], object],
    sizes: str,
) -> tuple[list[int], list[str], list[str]]:
    """Returns the lines, questions and answers of puzzles that are hard enough. All must be as long
    as the first.
    """
    lines, questions, answers = [], [], []
    cells = 0
    for line, question, answer, rating in rows:
        # the first puzzle gives the size of all
        if not cells and fits(len(question)):
            cells = len(question)
        if not cells or len(question) != cells or len(answer) != cells:
            expected = cells or sizes
            raise ConfigError(
                f"{file}: line {line} has {len(question)} and {len(answer)} cells, not {expected};"
                " correct it, and name the columns question and answer in a table"
            )
        try:
            hard = min_difficulty is None or int(rating) >= min_difficulty
        except ValueError:
            raise ConfigError(
                f"{file}: line {line} has rating={brief(rating)}, not a whole number; leave"
                " --min-difficulty out"
            ) from None
        # easier puzzles are dropped after they were checked
        if hard:
            lines.append(line)
            questions.append(question)
            answers.append(answer)
    # an empty split could neither be trained on nor evaluated
    if not lines:
        wanted = "" if min_difficulty is None else f" of --min-difficulty {min_difficulty} or more"
        raise ConfigError(
            f"{file}: holds no boards{wanted}; give another file or a lower --min-difficulty"
        )
    return lines, questions, answers


def check(file: str, lines: list[int], good: np.ndarray | np.bool_, problem: str) -> None:
    """Raises ConfigError for the first line that is not good."""
    if not good.all():
        raise ConfigError(
            f"{file}: line {lines[int((~good).argmax())]} {problem}; correct or remove it"
        )


def codes(puzzles: np.ndarray) -> list[str]:
    """Returns a short name of each board, the same wherever it is found."""
    return [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in puzzles.astype(np.uint8)]


def write_list(folder: Path, boards: Mapping[str, Boards]) -> None:
    """Lists the boards of a dataset by hash."""
    listed = {name: codes(puzzles) for name, (puzzles, _) in boards.items()}
    (folder / LIST).write_text(json.dumps(listed) + "\n")


def find(file: str, boards: Boards, wanted: list[str]) -> Boards:
    """Returns those boards of a file that are listed, in the order of the list."""
    puzzles, answers = boards
    rows = {code: row for row, code in enumerate(codes(puzzles))}
    if missing := [code for code in wanted if code not in rows]:
        raise ConfigError(
            f"{file}: lacks {len(missing):,} of {len(wanted):,} boards that --boards lists; give"
            " the files that the list was made from"
        )
    chosen = [rows[code] for code in wanted]
    return puzzles[chosen], answers[chosen]


def subsample(split: str, boards: Boards, options: argparse.Namespace) -> dict[str, Boards]:
    """Chooses as many boards of a split as the options say, by default all; and of the other
    training boards those that are held out for validation.
    """
    # without options, all boards in their order; otherwise a random choice by the seed
    puzzles, answers = boards
    held_out: int = options.validation if split == "train" else 0
    wanted: int | None = getattr(options, split)
    if wanted is None and not held_out:
        return {split: boards}
    # training and validation boards must not overlap
    left = len(puzzles) - held_out
    wanted = max(left, 1) if wanted is None else wanted
    if wanted > left:
        asked = f"--{split} {wanted}" + (f" --validation {held_out}" if held_out else "")
        raise ConfigError(f"{asked}: there are {len(puzzles)} {split} boards; ask for fewer")
    rng = np.random.default_rng(options.seed)
    chosen = {split: rng.choice(len(puzzles), wanted, replace=False)}
    if held_out:
        others = np.setdiff1d(np.arange(len(puzzles)), chosen[split])
        chosen["validation"] = rng.choice(others, held_out, replace=False)
    return {name: (puzzles[rows], answers[rows]) for name, rows in chosen.items()}


def puzzle_parser(name: str, about: str | None, hub: str, **size: Any) -> Parser:
    """Returns the command line of a builder that generates puzzles of a size or converts published
    ones, such as those of `hub`.
    """
    options = Parser(name, about)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--size", **size)
    source.add_argument("--input-dir", help="folder that holds train.csv and test.csv")
    source.add_argument("--hub", help=f"a dataset's name on the hub, such as {hub}")
    options.add_argument("--seed", type=whole(0), default=0)
    for split, published in (("train", "--subsample-size"), ("test", "--test-subsample-size")):
        options.add_argument(
            f"--{split}",
            published,
            dest=split,
            type=whole(1),
            help=f"{split} puzzles: {GENERATED} generated ones by default, or all that are given",
        )
    options.add_argument(
        "--validation",
        type=whole(0),
        default=0,
        metavar="N",
        help="training puzzles to hold out, for data.eval_split=validation",
    )
    options.add_argument(
        "--boards",
        type=Path,
        metavar="FILE",
        help=f"take the given puzzles that the {LIST} of another dataset lists, in its order",
    )
    options.add_argument(
        "--min-difficulty", type=int, help="drop given puzzles with a smaller rating"
    )
    return options


def check_options(options: argparse.Namespace, *generated: str) -> None:
    """Refuses options that mean nothing here; `generated` are those of generated puzzles."""
    unused = generated if options.size is None else ("min_difficulty", "boards")
    for name in unused:
        if getattr(options, name) is not None:
            kind = "generated puzzles, with --size" if options.size is None else "given puzzles"
            raise ConfigError(f"--{name.replace('_', '-')}: is for {kind} alone; leave it out")
