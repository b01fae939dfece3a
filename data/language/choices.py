"""Multiple-choice questions in HellaSwag's form: lines of JSON with `ctx`, several `endings`, and
the number of the right one as `label`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typing_extensions import Doc

from data.language.text_files import check_file
from data.source import IGNORE, Arrays
from data.tokenizer import Tokenizer
from utils.command.marks import A_PATH, SAME_RUN
from utils.errors import ConfigError, brief, short
from utils.files import open_plain

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


class Choices:
    """Each example is a question with all its endings, one row each, padded to one length.

    Only the tokens of a row's ending have labels. A question that is too long loses its beginning.
    `ending_bytes` is 0 in rows that fill up a question with fewer endings than others.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, seq_len: int) -> None:
        self._where = f"data.choices={path}"
        questions = _read(self._where, Path(path))
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        contexts = tokenizer.encode([context for context, _, _ in questions])
        self._answers = np.array([answer for _, _, answer in questions], np.int64)
        # for each question and ending: all tokens, and how many of them are the ending's
        self._rows: list[list[tuple[np.ndarray, int]]] = []
        self._bytes: list[list[int]] = []
        for context, (_, endings, _) in zip(contexts, questions, strict=True):
            before = np.concatenate([begin, context])
            rows = []
            for ending in tokenizer.encode([f" {text}" for text in endings]):
                tokens = np.concatenate([before, ending])[-seq_len - 1 :]
                rows.append((tokens.astype(np.int32), min(len(ending), len(tokens) - 1)))
            self._rows.append(rows)
            self._bytes.append([len(text.encode(errors="surrogatepass")) for text in endings])
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


def _read(where: str, path: Path) -> list[tuple[str, Sequence[str], int]]:
    """Returns the questions of a file: context, endings, and the number of the right one."""
    questions: list[tuple[str, Sequence[str], int]] = []
    try:
        check_file(where, path)
        with open_plain(path) as file:
            lines = file.readall().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: cannot be read ({brief(error)}); give a .jsonl file of lines like {FORM}"
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"{where}: line {number} is no question ({brief(error)}); write it like {FORM}"
                ) from None
    if not questions:
        raise ConfigError(f"{where}: holds no questions; write lines like {FORM}")
    return questions


def _question(row: Any) -> tuple[str, Sequence[str], int]:
    context, endings, label = row["ctx"], row["endings"], row["label"]
    if not isinstance(context, str) or not isinstance(endings, list) or len(endings) < 2:
        raise ValueError("ctx must be a text, and endings a list of two texts or more")
    if not all(isinstance(text, str) and text.strip() for text in endings):
        raise ValueError("an ending is no text, or empty")
    # a number in HellaSwag's own files, a text in those of the hub
    if isinstance(label, bool) or not str(label).isdecimal() or int(label) >= len(endings):
        raise ValueError(f"label={short(label)} is not in 0 … {len(endings) - 1}")
    return context, endings, int(label)


def choice_sets(
    path: str | None, where: str, tokenizer: Tokenizer | None, seq_len: int
) -> dict[str, Choices]:
    """Returns the evaluation set of a file by its name, or nothing if no file is given."""
    if path is None:
        return {}
    if tokenizer is None:
        raise ConfigError(
            f"data.choices={path}: {where}: dataset.json names no tokenizer; add one, or"
            " build again"
        )
    return {"choices": Choices(path, tokenizer, seq_len)}
