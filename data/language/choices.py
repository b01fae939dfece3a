"""Multiple-choice questions in HellaSwag's form: lines of JSON with `ctx`, several `endings`, and
the number of the right one as `label`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, TypeAdapter
from typing_extensions import Doc, TypedDict

from data.files import parse_json
from data.source import IGNORE, Arrays
from data.tokenizer import Tokenizer
from utils.command.marks import A_PATH, SAME_RUN
from utils.errors import ConfigError, brief
from utils.files import read_bytes

# the key of a source whose evaluations answer such questions
ChoicesFile = Annotated[
    str | None,
    SAME_RUN,
    A_PATH,
    Doc(
        "a .jsonl file of multiple-choice questions for evaluations, in HellaSwag's form: ctx,"
        " endings, label"
    ),
]
FORM = '{"ctx": "…", "endings": ["…", "…"], "label": 0}'


class _Question(TypedDict):
    ctx: str
    endings: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(min_length=2)]
    label: NonNegativeInt  # a number in HellaSwag's own files, a text in those of the hub


QUESTION = TypeAdapter(_Question)


class Choices:
    """Each example is a question with all its endings, one row each, padded to one length.

    Only the tokens of a row's ending have labels. A question that is too long loses its beginning.
    `ending_bytes` is 0 in rows that fill up a question with fewer endings than others.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, seq_len: int) -> None:
        self._where = f"data.choices={path}"
        questions = _read(self._where, Path(path))
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        contexts = tokenizer.encode([each["ctx"] for each in questions])
        self._answers = np.array([each["label"] for each in questions], np.int64)
        # for each question and ending: all tokens, and how many of them are the ending's
        self._rows: list[list[tuple[np.ndarray, int]]] = []
        self._bytes: list[list[int]] = []
        for context, each in zip(contexts, questions, strict=True):
            before = np.concatenate([begin, context])
            rows = []
            for ending in tokenizer.encode([f" {text}" for text in each["endings"]]):
                tokens = np.concatenate([before, ending])[-seq_len - 1 :]
                rows.append((tokens.astype(np.int32), min(len(ending), len(tokens) - 1)))
            self._rows.append(rows)
            self._bytes.append([len(text.encode()) for text in each["endings"]])
        self._most = max(map(len, self._rows))
        self._length = max(len(tokens) for rows in self._rows for tokens, _ in rows) - 1

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray) -> Arrays:
        batch = self.padding(len(indices))
        for row, index in enumerate(indices.tolist()):
            for number, (tokens, counted) in enumerate(self._rows[index]):
                length = len(tokens) - 1
                batch["inputs"][row, number, :length] = tokens[:-1]
                batch["labels"][row, number, length - counted : length] = tokens[-counted:]
                batch["ending_bytes"][row, number] = self._bytes[index][number]
            batch["answer"][row] = self._answers[index]
        return batch

    def padding(self, rows: int) -> Arrays:
        shape = (rows, self._most, self._length)
        return {
            "inputs": np.zeros(shape, np.int32),
            "labels": np.full(shape, IGNORE, np.int32),
            "ending_bytes": np.zeros(shape[:2], np.int64),
            "answer": np.full(rows, IGNORE, np.int64),
        }


def _read(where: str, path: Path) -> list[_Question]:
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({brief(error)}); give a .jsonl file") from None
    questions = [
        _question(f"{where}: line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not questions:
        raise ConfigError(f"{where}: holds no questions; write lines like {FORM}")
    return questions


def _question(where: str, line: bytes) -> _Question:
    try:
        question = parse_json(line, QUESTION)
        if question["label"] >= len(question["endings"]):
            raise ValueError(f"label={question['label']}: there is no such ending")
    except ValueError as error:
        raise ConfigError(f"{where}: {brief(error)}; write it like {FORM}") from None
    return question
