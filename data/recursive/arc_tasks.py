"""Reads ARC tasks from Kaggle's pairs of files, or from folders of one file per task."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data.recursive.arc import COLOURS, SIDE
from utils.errors import ConfigError, brief
from utils.files import read_bytes

CHALLENGES, SOLUTIONS = "_challenges.json", "_solutions.json"

Pair = tuple[np.ndarray, np.ndarray]  # grids of colours: what is given, and the answer


@dataclass(frozen=True)
class Task:
    """One puzzle: pairs that show it, pairs that ask for it, and what the latter are used for."""

    name: str
    where: str
    shown: list[Pair]
    asked: list[Pair]
    trained: bool  # on the pairs that ask, too
    tested: bool

    @property
    def pairs(self) -> list[Pair]:
        return self.shown + self.asked

    @property
    def training_pairs(self) -> list[Pair]:
        return self.pairs if self.trained else self.shown


def read_tasks(inputs: list[tuple[str, str]]) -> list[Task]:
    """Reads all tasks of (option, path), in order. A task that is given twice is one."""
    tasks: dict[str, Task] = {}
    for option, path in inputs:
        for name, where, raw in _raw_tasks(f"{option} {path}", path):
            shown, asked = (
                [
                    _pair(f"{where}, {part} pair {number}", one)
                    for number, one in enumerate(list_of(where, raw, part), 1)
                ]
                for part in ("train", "test")
            )
            task = Task(name, where, shown, asked, option == "--train", option == "--test")
            if (other := tasks.get(name)) is None:
                tasks[name] = task
            elif contents(task.pairs) == contents(other.pairs):
                tasks[name] = replace(
                    other, trained=other.trained or task.trained, tested=other.tested or task.tested
                )
            else:
                raise ConfigError(
                    f"{where}: another task of this name, with other content, is in {other.where};"
                    " rename or leave out one"
                )
    return [*tasks.values()]


def contents(pairs: list[Pair]) -> list[bytes]:
    """Returns a value that is equal for equal pairs."""
    return [b"".join(bytes(grid.shape) + grid.tobytes() for grid in pair) for pair in pairs]


def standing_in_training(tasks: list[Task]) -> tuple[list[str], int, int]:
    """Returns the tasks whose test pairs are also trained on, and the numbers of such pairs and of
    all.
    """
    trained = set(chain.from_iterable(contents(task.training_pairs) for task in tasks))
    found = {
        task.name: sum(one in trained for one in contents(task.asked))
        for task in tasks
        if task.tested
    }
    return (
        [name for name, count in found.items() if count],
        sum(found.values()),
        sum(len(task.asked) for task in tasks if task.tested),
    )


def _raw_tasks(named: str, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the name, place and content of each task in an input."""
    kaggle = Path(path if path.endswith(CHALLENGES) else f"{path}{CHALLENGES}")
    if os.path.isfile(kaggle):
        yield from _raw_kaggle(kaggle)
        return
    if not os.path.exists(path):
        raise ConfigError(
            f"{named}: no such folder, nor a file {kaggle}; give a folder of task files, or what"
            f" comes before {CHALLENGES}"
        )
    files = sorted(Path(path).rglob("*.json")) if os.path.isdir(path) else [Path(path)]
    if not files:
        raise ConfigError(
            f"{named}: holds no .json files; give a folder of task files, or what comes before"
            f" {CHALLENGES}"
        )
    for file in files:
        if file.name.endswith(CHALLENGES):
            raise ConfigError(
                f"{named}: holds {file.name}; give {str(file).removesuffix(CHALLENGES)} instead"
            )
        yield file.stem, str(file), object_of(str(file), read_json(file))


def _raw_kaggle(file: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Reads Kaggle's tasks, whose answers are in another file."""
    beside = Path(str(file).removesuffix(CHALLENGES) + SOLUTIONS)
    if not os.path.isfile(beside):
        raise ConfigError(f"{file}: lacks its answers; lay {beside.name} beside it")
    challenges, solutions = (object_of(str(one), read_json(one)) for one in (file, beside))
    for name, task in sorted(challenges.items()):
        where = f"{file}: task {brief(name)}"
        asked, answers = list_of(where, object_of(where, task), "test"), solutions.get(name)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise ConfigError(
                f"{beside}: task {brief(name)} has not {len(asked)} answers, one for each test"
                " pair; correct or remove it"
            )
        both = [
            object_of(f"{where}, test pair {number}", one) | {"output": answer}
            for number, (one, answer) in enumerate(zip(asked, answers, strict=True), 1)
        ]
        yield name, where, task | {"test": both}


def read_json(file: Path) -> Any:
    """Reads a JSON file; an error names it."""
    try:
        return json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: cannot be read as JSON ({brief(error)}); correct or remove it"
        ) from None


def object_of(where: str, content: Any) -> dict[str, Any]:
    """Returns the content if it is a JSON object, or raises ConfigError."""
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: is a {type(content).__name__}, not an object; correct or remove it"
        )
    return content


def list_of(where: str, task: dict[str, Any], part: str) -> list[Any]:
    """Returns the pairs of a part of a task, or raises ConfigError."""
    pairs = task.get(part)
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(f"{where}: has no {part} pairs; correct or remove it")
    return pairs


def _pair(where: str, pair: Any) -> Pair:
    given, answer = (
        grid_of(f"{where}, {side}", object_of(where, pair).get(side))
        for side in ("input", "output")
    )
    return given, answer


def grid_of(where: str, rows: Any) -> np.ndarray:
    """Returns a grid of colours, or raises ConfigError."""
    problem = ""
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
        problem = "is missing" if rows is None else "is no grid, or an empty one"
    elif len({len(row) for row in rows}) > 1:
        problem = f"has rows of {min(map(len, rows))} and {max(map(len, rows))} cells"
    elif len(rows) > SIDE or len(rows[0]) > SIDE:
        problem = f"is {len(rows)}x{len(rows[0])}, larger than {SIDE}x{SIDE}"
    elif (cells := [*chain.from_iterable(rows)]) and (
        {*map(type, cells)} != {int} or not 0 <= min(cells) <= max(cells) < COLOURS
    ):
        wrong = next(cell for cell in cells if type(cell) is not int or not 0 <= cell < COLOURS)
        problem = f"has a cell {brief(wrong)}, not a colour from 0 to {COLOURS - 1}"
    if problem:
        raise ConfigError(f"{where}: {problem}; correct or remove it")
    return np.array(rows, np.uint8)
