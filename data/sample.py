"""A prompt as an evaluation set of one example, and the text with which a language model continues
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np
from torch import Tensor

from data.source import Batch, OneExample
from data.tokenizer import Tokenizer
from utils.measure.evaluator import Prediction, Report
from utils.measure.scene import scene

MOST_SHOWN = 8000  # characters of a continuation on the report page
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "x24": "$"}
ESCAPE = re.compile(r"""\\(n|t|r|\\|"|'|x24)""")
HELD_OUT = 64  # tokens of held-out text that are continued, where no prompt is given


def prompt_tokens(
    prompt: str | None,
    tokenizer: Tokenizer | None,
    begin: int | None,
    held_out: Sequence[np.ndarray],
    seq_len: int,
) -> np.ndarray | None:
    """The user's words as a document begins, or the beginning of held-out text; nothing where there
    is none, or no text can be made.
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
    r"""A prompt as the user means it: \n, \t, \r, \\, \" and \' as in Python, \x24 for a dollar."""
    return ESCAPE.sub(lambda match: ESCAPED[match[1]], prompt)


def prompt_set(
    tokens: np.ndarray, new_tokens: int, temperature: float, top_k: int, seed: int
) -> OneExample:
    """The prompt, room for what follows, and how that is drawn."""
    return OneExample(
        inputs=tokens.astype(np.int32), continuation=np.zeros(new_tokens, np.int32),
        temperature=np.float32(temperature), top_k=np.int32(top_k), sample_seed=np.int64(seed),
    )  # fmt: skip


class Continuation:
    """Prompt and continuation as text."""

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
    """As far as both texts are the same."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def shown(text: str) -> str:
    """Text as a terminal may have it: a net may write what a terminal obeys."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
