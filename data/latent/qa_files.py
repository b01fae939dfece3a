"""Reads questions about texts, from files or the hub, in SQuAD's layout or one in each row."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import ConfigError, brief, short
from utils.files import read_bytes

KINDS = (".json", ".jsonl")
TEST_NAMES = ("test", "validation", "valid", "dev", "eval")
LAYOUT = 'SQuAD\'s layout, or rows of {"context": …, "question": …, "answer": …}'


@dataclass(frozen=True)
class Example:
    """A question about a text, with the answers that count as right. Training uses the first."""

    context: str
    question: str
    answers: tuple[str, ...]
    where: str = ""  # for messages
    bits: float = 0.0  # of information in the text, if that is known


Sets = dict[str, list[Example]]


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
        kind: [_of_row(f"{key}: row {number} of {kind}", row) for number, row in enumerate(some)]
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
    key = f"data_path={path}"
    try:
        text = read_bytes(path).decode()
        if path.suffix == ".jsonl":
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield _of_row(f"{key}: line {number}", json.loads(line))
            return
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # a ConfigError is a ValueError
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{key}: cannot be read as JSON in UTF-8 ({brief(error)}); give {LAYOUT}"
        ) from None
    yield from _of_squad(key, content) if isinstance(content, dict) else _of_list(key, content)


def _of_list(key: str, rows: Any) -> Iterator[Example]:
    if not isinstance(rows, list):
        raise ConfigError(f"{key}: holds {short(rows)}; give {LAYOUT}")
    for number, row in enumerate(rows, 1):
        yield _of_row(f"{key}: row {number}", row)


def _of_squad(key: str, content: Mapping[str, Any]) -> Iterator[Example]:
    try:
        for article in content["data"]:
            if "paragraphs" not in article:
                yield _of_row(f"{key}: row {short(article.get('id', '?'))}", article)
                continue
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    row = {
                        "context": paragraph["context"],
                        "question": question["question"],
                        "answers": question.get("answers", []),
                    }
                    yield _of_row(
                        f"{key}: question {short(question.get('id', row['question']))}", row
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}: is not in SQuAD's layout ({brief(error)}); give {LAYOUT}"
        ) from None


def _of_row(where: str, row: Any) -> Example:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: is {short(row)}; give {LAYOUT}")
    for name in ("context", "question"):
        if not isinstance(row.get(name), str):
            raise ConfigError(f"{where}: {name} is {short(row.get(name))}, no text; give {LAYOUT}")
        if not row[name].strip():
            raise ConfigError(f"{where}: {name} is empty; give one, or leave the row out")
    given = row.get("answers", row.get("answer", []))
    given = (
        given.get("text", [])
        if isinstance(given, Mapping)
        else [given]
        if isinstance(given, str)
        else given
    )
    texts = [
        answer.get("text") if isinstance(answer, Mapping) else answer for answer in given or []
    ]
    answers = [text for text in texts if isinstance(text, str)]
    if len(answers) < len(texts):
        raise ConfigError(f"{where}: answers are {short(given)}, no texts; give {LAYOUT}")
    return Example(
        row["context"], row["question"], tuple(answer.strip() for answer in answers), where
    )
