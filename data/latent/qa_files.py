"""Reads questions about texts, from files or the hub, in SQuAD's layout or one in each row."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from data.files import parse_json
from utils.errors import ConfigError, brief
from utils.files import read_bytes

KINDS = (".json", ".jsonl")
TEST_NAMES = ("test", "validation", "valid", "dev", "eval")
LAYOUT = 'SQuAD\'s layout, or rows of {"context": …, "question": …, "answers": […]}'


@dataclass(frozen=True)
class Example:
    """A question about a text, with the answers that count as right. Training uses the first."""

    context: str
    question: str
    answers: tuple[str, ...]
    where: str = ""  # for messages
    bits: float = 0.0  # of information in the text, if that is known


Sets = dict[str, list[Example]]


Text = Annotated[str, Field(pattern=r"\S")]


class _Answer(TypedDict):
    text: str


class _Answers(TypedDict):  # as the hub's rows have them
    text: list[str]


class _Asked(TypedDict):
    question: Text
    answers: list[str | _Answer] | _Answers


class _Row(_Asked):
    context: Text


class _Paragraph(TypedDict):
    context: Text
    qas: list[_Asked]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _Squad(TypedDict):
    data: list[_Article]


ROW, ROWS, SQUAD = (TypeAdapter[Any](kind) for kind in (_Row, list[_Row], _Squad))


def read_path(path: str) -> Sets:
    """Reads a folder with files for training and perhaps for testing, or one file for training."""
    if os.path.exists(path) and not os.path.isdir(path):
        return {"train": list(_read(Path(path))), "test": []}
    if not os.path.isdir(path):
        raise ConfigError(
            f"data_path={path}: no such file or folder; give a .json or .jsonl file, or a folder"
            " with train and test files"
        )
    files = sorted(
        file
        for file in Path(path).iterdir()
        if file.suffix in KINDS and not file.name.startswith(".")
    )
    files_of = {"train": [file for file in files if "train" in file.stem.lower()]}
    files_of["test"] = [
        file
        for file in files
        if file not in files_of["train"] and any(name in file.stem.lower() for name in TEST_NAMES)
    ]
    if not files_of["train"]:
        raise ConfigError(
            f"data_path={path}: no train.json or train.jsonl there; give a folder with train and"
            " test files, or one file"
        )
    return {
        name: [example for file in some for example in _read(file)]
        for name, some in files_of.items()
    }


def read_hub(name: str) -> Sets:
    """Reads a dataset on the hub, whose `validation` split is the test set."""
    from datasets import load_dataset

    try:
        rows = {
            "train": load_dataset(name, split="train"),
            "test": load_dataset(name, split="validation"),
        }
    except Exception as error:  # the hub's client raises many kinds of errors
        raise ConfigError(
            f"data.hub={name}: cannot be loaded ({brief(error)}); download it and give"
            " data_path=FOLDER"
        ) from None
    key = f"data.hub={name}"
    return {
        kind: [_example(f"{key}: row {number} of {kind}", row) for number, row in enumerate(some)]
        for kind, some in rows.items()
    }


def split(examples: Sequence[Example], held_out: float) -> Sets:
    """Holds out texts by their content, so that no text is in both sets. If there are two texts or
    more, each set gets one; a single text is for training.
    """
    sets: Sets = {"train": [], "test": []}
    places = {example.context: _place(example.context) for example in examples}
    tested = {context for context, place in places.items() if place < held_out}
    if held_out:
        in_order = sorted(places, key=places.__getitem__)
        tested = (tested | {*in_order[:1]}) - {*in_order[-1:]}
    for example in examples:
        sets["test" if example.context in tested else "train"].append(example)
    return sets


def _place(context: str) -> float:
    """Returns a pseudo-random number from 0 to 1."""
    digest = hashlib.sha256(context.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _read(path: Path) -> Iterator[Example]:
    where = f"data_path={path}"
    try:
        content = read_bytes(path)
        if path.suffix == ".jsonl":
            for number, line in enumerate(content.split(b"\n"), 1):
                where = f"data_path={path}: line {number}"
                if line.strip():
                    yield _example(where, parse_json(line, ROW))
        elif content.lstrip().startswith(b"{"):
            yield from _of_squad(where, parse_json(content, SQUAD))
        else:
            for number, row in enumerate(parse_json(content, ROWS), 1):
                yield _example(f"{where}: row {number}", row)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {brief(error)}; give {LAYOUT}") from None


def _of_squad(where: str, content: _Squad) -> Iterator[Example]:
    asked: Iterator[Any] = (
        {**question, "context": paragraph["context"]}
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    )
    for number, row in enumerate(asked, 1):
        yield _example(f"{where}: question {number}", row)


def _example(where: str, row: _Row) -> Example:
    given = row["answers"]
    texts = (
        given["text"]
        if isinstance(given, dict)
        else [each if isinstance(each, str) else each["text"] for each in given]
    )
    return Example(row["context"], row["question"], tuple(text.strip() for text in texts), where)
