"""Puzzles as published tables: `source,question,answer,rating` in CSV files or on the hub."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.language.text_files import check_file
from utils.errors import ConfigError, brief

COLUMNS = ("question", "answer", "rating")

Row = tuple[int, Any, Any, Any]  # line number, then COLUMNS
Boards = tuple[np.ndarray, np.ndarray]  # puzzles and answers


def read_split(
    input_dir: str | None, hub: str | None, split: str, without: str = ""
) -> tuple[str, Iterator[Row]]:
    """A split's rows, and how messages name them; `without` a file that is how it would do."""
    if input_dir is None:
        assert hub is not None
        return f"{hub} {split}", read_hub(hub, split)
    file = Path(input_dir) / f"{split}.csv"
    return str(file), read_csv(file, without)


def read_csv(path: Path, without: str = "") -> Iterator[Row]:
    """The rows of a file with their line numbers."""
    if not os.path.exists(path):
        raise ConfigError(
            f"--input-dir {path.parent}: no {path.name} there; give a folder that holds train.csv"
            f" and test.csv{without}"
        )
    check_file(str(path), path)
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            if missing := [name for name in COLUMNS if name not in header]:
                raise ConfigError(
                    f"{path}: line 1 lacks the column {missing[0]}; it should be"
                    " source,question,answer,rating"
                )
            places = [header.index(name) for name in COLUMNS]
            for row in reader:
                if len(row) != len(header):
                    raise ConfigError(
                        f"{path}: line {reader.line_num} has {len(row)} fields, not {len(header)};"
                        " correct or remove it"
                    )
                yield reader.line_num, row[places[0]], row[places[1]], row[places[2]]
        except (csv.Error, OSError) as error:
            raise ConfigError(
                f"{path}: line {reader.line_num} cannot be read ({error}); correct or remove it"
            ) from None


def read_hub(name: str, split: str) -> Iterator[Row]:
    """The rows of a dataset on the hub, or in a folder that `datasets` understands."""
    from datasets import Features, Value, load_dataset

    # answers are digits only: without types they would be read as (far too large) numbers
    features = Features({column: Value("string") for column in ("source", *COLUMNS)})
    try:
        rows = load_dataset(name, split=split, features=features)
    except Exception as error:  # whatever the hub's client raises, the user's way out is the same
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--hub {name}: split {split} cannot be loaded ({reason}); download the CSV files and"
            " use --input-dir"
        ) from None
    for start in range(0, len(rows), 10_000):
        part = rows[start : start + 10_000]
        for place, (question, answer, rating) in enumerate(
            zip(*(part[column] for column in COLUMNS), strict=True)
        ):
            # as lines of a CSV file, below its header
            yield start + place + 2, question or "", answer or "", rating or ""


def collect(
    file: str,
    rows: Iterable[Row],
    min_difficulty: int | None,
    fits: Callable[[int], object],
    sizes: str,
) -> tuple[list[int], list[str], list[str]]:
    """Lines, questions and answers of those that are hard enough, all as long as the first one that
    fits.
    """
    lines, questions, answers = [], [], []
    cells = 0
    for line, question, answer, rating in rows:
        if not cells and fits(len(question)):
            cells = len(question)
        if not len(question) == len(answer) == cells:
            expected = cells or sizes
            raise ConfigError(
                f"{file}: line {line} has {len(question)} and {len(answer)} cells, not {expected};"
                " correct or remove it"
            )
        try:
            difficulty = int(rating)
        except ValueError:
            raise ConfigError(
                f"{file}: line {line} has rating={brief(rating)}, not a whole number; correct or"
                " remove it"
            ) from None
        if min_difficulty is None or difficulty >= min_difficulty:
            lines.append(line)
            questions.append(question)
            answers.append(answer)
    if not lines:
        wanted = "" if min_difficulty is None else f" of --min-difficulty {min_difficulty} or more"
        raise ConfigError(
            f"{file}: holds no boards{wanted}; give another file or a lower --min-difficulty"
        )
    return lines, questions, answers


def codes(boards: list[str]) -> np.ndarray:
    """The characters of equally long strings as numbers (N, cells); what is not ASCII becomes a
    question mark.
    """
    return np.frombuffer("".join(boards).encode("ascii", "replace"), np.uint8).reshape(
        len(boards), -1
    )


def check(file: str, lines: list[int], good: np.ndarray | np.bool_, problem: str) -> None:
    """Name the first line of which it is not true."""
    if not good.all():
        raise ConfigError(
            f"{file}: line {lines[int((~good).argmax())]} {problem}; correct or remove it"
        )


def subsample(boards: Boards, wanted: int | None, seed: int) -> Boards:
    """So many of them, chosen at random; all of them if that is not asked for."""
    puzzles, answers = boards
    if wanted is None:
        return boards
    if wanted > len(puzzles):
        raise ConfigError(
            f"--subsample-size {wanted}: there are only {len(puzzles)} boards; ask for fewer"
        )
    chosen = np.random.default_rng(seed).choice(len(puzzles), wanted, replace=False)
    return puzzles[chosen], answers[chosen]
