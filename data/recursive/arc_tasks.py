"""Reads ARC tasks from Kaggle's pairs of files, or from folders of one file per task."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from data.recursive.arc import COLOURS, SIDE
from utils.errors import ConfigError, brief
from utils.files import read_json

CHALLENGES, SOLUTIONS = "_challenges.json", "_solutions.json"
CORRECT = "correct or remove it"

Pair = tuple[np.ndarray, np.ndarray]  # grids of colours: what is given, and the answer


def rectangle(rows: list[list[int]]) -> list[list[int]]:
    if len({*map(len, rows)}) > 1:
        raise ValueError("has rows of different lengths")
    return rows


Row = Annotated[list[Annotated[int, Field(ge=0, lt=COLOURS)]], Field(min_length=1, max_length=SIDE)]
Grid = Annotated[list[Row], Field(min_length=1, max_length=SIDE), AfterValidator(rectangle)]


class _Asked(TypedDict):
    input: Grid


class _Pair(_Asked):
    output: Grid


class _Shown(TypedDict):
    train: Annotated[list[_Pair], Field(min_length=1)]


class _Task(_Shown):
    test: Annotated[list[_Pair], Field(min_length=1)]


class _Challenge(_Shown):
    test: Annotated[list[_Asked], Field(min_length=1)]


TASK = TypeAdapter(_Task)
KAGGLE = TypeAdapter(dict[str, _Challenge]), TypeAdapter(dict[str, list[Grid]])


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
        for name, where, shown, asked in _tasks(f"{option} {path}", path):
            task = Task(name, where, shown, asked, option == "--train", option == "--test")
            # published collections overlap: the same task may be given for training and as a test
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
    # pairs as they are, before augmentation: a net that has seen one has seen its images
    trained = set(chain.from_iterable(contents(task.training_pairs) for task in tasks))
    names, found, total = [], 0, 0
    for task in tasks:
        if task.tested:
            count = sum(pair in trained for pair in contents(task.asked))
            if count:
                names.append(task.name)
            found, total = found + count, total + len(task.asked)
    return names, found, total


def _tasks(named: str, path: str) -> Iterator[tuple[str, str, list[Pair], list[Pair]]]:
    """Yields the name, place and pairs of each task in an input."""
    # a file is found by what stands before its ending, as both files of Kaggle begin so
    kaggle = Path(path if path.endswith(CHALLENGES) else f"{path}{CHALLENGES}")
    if os.path.isfile(kaggle):
        yield from _kaggle_tasks(kaggle)
        return
    if not os.path.exists(path):
        raise ConfigError(
            f"{named}: no such folder, nor a file {kaggle}; give a folder of task files, or what"
            f" comes before {CHALLENGES}"
        )
    # otherwise one file for each task, in order, so that ids stay the same
    files = sorted(Path(path).rglob("*.json")) if os.path.isdir(path) else [Path(path)]
    if not files:
        raise ConfigError(
            f"{named}: holds no .json files; give a folder of task files, or the path before"
            f" {CHALLENGES}"
        )
    for file in files:
        if file.name.endswith(CHALLENGES):
            raise ConfigError(
                f"{named}: holds {file.name}; give {str(file).removesuffix(CHALLENGES)} instead"
            )
        task = read_json(file, TASK, CORRECT)
        yield file.stem, str(file), _pairs(task["train"]), _pairs(task["test"])


def _kaggle_tasks(file: Path) -> Iterator[tuple[str, str, list[Pair], list[Pair]]]:
    """Reads Kaggle's tasks, whose answers are in another file."""
    beside = Path(str(file).removesuffix(CHALLENGES) + SOLUTIONS)
    if not os.path.isfile(beside):
        raise ConfigError(f"{file}: lacks its answers; lay {beside.name} beside it")
    # joined by name: the answers lie in another file, as the contest keeps them back
    challenges = read_json(file, KAGGLE[0], CORRECT)
    solutions = read_json(beside, KAGGLE[1], CORRECT)
    for name, task in sorted(challenges.items()):
        asked, answers = task["test"], solutions.get(name, [])
        if len(answers) != len(asked):
            raise ConfigError(
                f"{beside}: task {brief(name)} has {len(answers)} answers for {len(asked)} test"
                " pairs; correct or remove it"
            )
        pairs: list[_Pair] = [
            {"input": pair["input"], "output": answer}
            for pair, answer in zip(asked, answers, strict=True)
        ]
        yield name, f"{file}: task {brief(name)}", _pairs(task["train"]), _pairs(pairs)


def _pairs(pairs: Sequence[_Pair]) -> list[Pair]:
    return [
        (np.array(pair["input"], np.uint8), np.array(pair["output"], np.uint8)) for pair in pairs
    ]
