"""An evaluation set of one prompt, and the text with which a language model continues it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt
from torch import Tensor
from typing_extensions import Doc

from data.source import Batch, Examples
from data.tokenizer import Tokenizer
from utils.command.marks import SAME_RUN
from utils.measure.evaluator import Prediction, Report
from utils.measure.scene import scene

MOST_SHOWN = 8000  # characters of a continuation on the report page
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "x24": "$"}
ESCAPE = re.compile(r"""\\(n|t|r|\\|"|'|x24)""")
HELD_OUT = 64  # tokens of held-out text that are continued, where no prompt is given

# keys of a source whose evaluations continue a prompt
Prompt = Annotated[
    str | None,
    SAME_RUN,
    Doc("text that evaluations continue; null: the start of the held-out text"),
]
NewTokens = Annotated[
    NonNegativeInt, SAME_RUN, Doc("length of the continuation in tokens; 0: none")
]
Temperature = Annotated[
    float, Field(ge=0, le=1000), SAME_RUN, Doc("of sampling; 0: always the likeliest token")
]
TopK = Annotated[NonNegativeInt, SAME_RUN, Doc("draw from so many likeliest tokens; 0: from all")]


def prompt_tokens(
    prompt: str | None,
    tokenizer: Tokenizer | None,
    begin: int | None,
    held_out: Sequence[np.ndarray],
    seq_len: int,
) -> np.ndarray | None:
    """Returns the prompt as the start of a document, or the start of the held-out text; None if
    there is neither, or no tokenizer.
    """
    if tokenizer is None:
        return None
    if prompt is not None:
        tokens = tokenizer.encode([unescaped(prompt)])[0].astype(np.int64)
        return tokens if begin is None else np.concatenate([[begin], tokens])
    length = max(1, min(HELD_OUT, seq_len // 2))
    return next(
        (tokens[:length].astype(np.int64) for tokens in held_out if len(tokens) >= length), None
    )


def unescaped(prompt: str) -> str:
    r"""Reads \n, \t, \r, \\, \" and \' in a prompt as Python does, and \x24 as a dollar."""
    return ESCAPE.sub(lambda match: ESCAPED[match[1]], prompt)


def prompt_set(
    tokens: np.ndarray, new_tokens: int, temperature: float, top_k: int, seed: int
) -> Examples:
    """Returns a set of one prompt, with room for its continuation and how to draw it."""
    row = {
        "inputs": tokens.astype(np.int32),
        "continuation": np.zeros(new_tokens, np.int32),
        "temperature": np.float32(temperature),
        "top_k": np.int32(top_k),
        "sample_seed": np.int64(seed),
    }
    return Examples([row])


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
        # a prompt may end within a character
        given = _beginning(shown(self._tokenizer.decode(prompt)), text)
        files = scene(
            "sample",
            "text",
            "A continuation",
            items=[{"prompt": given, "continuation": text[len(given) :][:MOST_SHOWN]}],
        )
        return Report(files={"sample.txt": text + "\n", **files}, text=text)


def _beginning(one: str, other: str) -> str:
    """Returns the common beginning of two texts."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def shown(text: str) -> str:
    """Replaces characters that control a terminal, which a net may write."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
