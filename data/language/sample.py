"""An evaluation set that asks a language model to continue a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt
from torch import Tensor

from contract import Batch, Evaluator, Examples, Prediction, Report
from data.gym import Accepted, Gym
from data.language.token_files import Corpus
from data.tokenizer import Tokenizer
from utils.command.marks import SAME_RUN, Keys
from utils.errors import ConfigError
from utils.measure.scene import scene

MOST_SHOWN = 8000  # characters of a continuation on the report page
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "x24": "$"}
ESCAPE = re.compile(r"""\\(n|t|r|\\|"|'|x24)""")
HELD_OUT = 64  # tokens of held-out text that are continued, where no prompt is given


class SampleKeys(Keys):
    """Keys of a source whose evaluations continue a prompt."""

    prompt: Annotated[str | None, SAME_RUN]
    """Text that evaluations continue; null: the start of the held-out text"""

    max_new_tokens: Annotated[NonNegativeInt, SAME_RUN]
    """Length of the continuation in tokens; 0: none"""

    temperature: Annotated[float, Field(ge=0, le=1000), SAME_RUN]
    """Temperature of sampling; 0: always the likeliest token"""

    top_k: Annotated[NonNegativeInt, SAME_RUN]
    """Draw from so many likeliest tokens; 0: from all"""


def sample_set(corpus: Corpus, seed: int, seq_len: int, keys: SampleKeys) -> dict[str, Examples]:
    """Returns the set `sample`: the prompt, or the start of the held-out text, with room for its
    continuation and how to draw it. Returns none where there is nothing to continue.
    """
    # without a tokenizer neither a prompt nor a continuation can be read
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        if keys.prompt is not None:
            raise ConfigError(
                f"data.prompt={keys.prompt}: {corpus.where}: dataset.json names no tokenizer; add"
                " one, or build again"
            )
        return {}
    # the user's text, or the beginning of held-out text, at most half a context
    if keys.prompt is not None:
        begin = [] if corpus.begin is None else [corpus.begin]
        start = np.concatenate([begin, tokenizer.encode([unescaped(keys.prompt)])[0]])
    else:
        length = max(1, min(HELD_OUT, seq_len // 2))
        long_enough = [tokens for tokens in corpus.files["val"] if len(tokens) >= length]
        start = long_enough[0][:length] if long_enough else np.empty(0)
    if not len(start) or not keys.max_new_tokens:
        return {}
    # as data, so that every net that continues texts draws in the same way
    row = {
        "inputs": start.astype(np.int32),
        "continuation": np.zeros(keys.max_new_tokens, np.int32),
        "temperature": np.float32(keys.temperature),
        "top_k": np.int32(keys.top_k),
        "sample_seed": np.int64(seed),
    }
    return {"sample": Examples([row])}


def asked_set(
    corpus: Corpus, file: Path
) -> tuple[dict[str, Examples], Callable[[], Sequence[Evaluator]]]:
    """Returns the set `asked`, if a dataset is made of questions: those that it holds out, with
    room for their answers; and what makes its evaluators.
    """
    tokenizer, begin = corpus.tokenizer, corpus.begin
    if tokenizer is None or begin is None or not file.exists():
        return {}, tuple
    gym = Gym(file, "val")
    entries = [gym.entry(index) for index in range(len(gym))]
    questions = tokenizer.encode([f"{entry['question'].strip()}\n" for entry in entries])
    longest = 1 + max(map(len, tokenizer.encode([entry["answer"] for entry in entries])))
    lengths = np.array([1 + len(question) for question in questions], np.int32)
    rows = {name: np.zeros_like(lengths) for name in ("temperature", "top_k", "sample_seed")}
    rows["continuation"] = np.zeros((len(gym), longest), np.int32)
    rows["inputs"] = np.full((len(gym), lengths.max()), begin, np.int32)
    for row, question in zip(rows["inputs"], questions, strict=True):
        row[1 : 1 + len(question)] = question

    def text(answer: np.ndarray) -> str:  # it ends where another text would begin
        return tokenizer.decode([*takewhile(begin.__ne__, answer.tolist())])

    examples = Examples(rows | {"prompt_length": lengths})
    return {"asked": examples}, lambda: [Accepted(gym, "continuation", text)]


def unescaped(prompt: str) -> str:
    r"""Reads \n, \t, \r, \\, \" and \' in a prompt as Python does, and \x24 as a dollar."""
    return ESCAPE.sub(lambda match: ESCAPED[match[1]], prompt)


class Continuation:
    """Shows a prompt and its continuation as text."""

    scalars = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[str, Tensor] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "continuation" in prediction.outputs:
            self._rows = {
                "prompt": batch["inputs"][:1],
                "continuation": prediction.outputs["continuation"][:1],
            }

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        prompt, continuation = (rows[name][0].tolist() for name in ("prompt", "continuation"))
        text = shown(self._tokenizer.decode([*prompt, *continuation]))
        # a prompt may end within a character, which then looks different with what follows
        begun = _common_beginning(shown(self._tokenizer.decode(prompt)), text)
        files = scene(
            "sample",
            "text",
            "A continuation",
            items=[{"prompt": begun, "continuation": text[len(begun) :][:MOST_SHOWN]}],
        )
        return Report(files={"sample.txt": text + "\n", **files}, text=text)


def _common_beginning(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def shown(text: str) -> str:
    """Replaces characters that control a terminal, which a net may write."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
