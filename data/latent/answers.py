"""Scores the answers that language models give from latents, and from each baseline."""

from __future__ import annotations

import json
import re
import string
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.latent.qa_files import Example
from data.source import Batch
from utils.latent import ANSWER_INPUTS, CUTS, WIRES
from utils.measure.evaluator import Prediction, Report
from utils.measure.metrics import wilson
from utils.measure.scene import Files, fitting, scene

FILE = "answers.json"
SHOWN = 5  # questions with their answers
CONTEXT = 600  # characters of a text on the report page
ARTICLES = re.compile(r"\b(a|an|the)\b")
NAMES = {
    "float16": "latents, float16",
    "int8": "latents, int8",
    "int4": "latents, int4",
    "text": "the whole text",
    "first": "its first tokens, one for each position",
    "cut": "its first bytes, as many as the latents",
    "nothing": "nothing",
    "other": "another text's latents",
    "mean": "mean latents",
}
READABLE = ("text", *CUTS, "nothing")  # text that a model reads without an encoder
LABEL, BYTES = 42, 7  # widths of columns


class Answers:
    """SQuAD's exact match and F1, for each model and each input that it answers from."""

    def __init__(
        self,
        examples: Sequence[Example],
        decode: Sequence[Callable[[Sequence[int]], str]],
        end: str,
    ) -> None:
        self._examples, self._decode, self._end = examples, decode, end
        self._columns = [
            f"{way}/{number}" for way in ANSWER_INPUTS for number in range(len(decode))
        ]
        self.scalars = [
            *(f"{kind}/{column}" for kind in ("exact", "f1") for column in self._columns),
            *(f"bytes/{way}" for way in ANSWER_INPUTS),
            "bytes/deflated_size",
            "information",
        ]
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        rows = {
            f"bytes/{way}": prediction.outputs[f"bytes/{way}"][: len(indices)].cpu().double()
            for way in ANSWER_INPUTS
        }
        for column in self._columns:
            ids = prediction.outputs[f"answer/{column}"][: len(indices)].cpu()
            decode = self._decode[int(column.rpartition("/")[2])]
            pairs = [
                (self.text(decode, row), self._examples[index].answers)
                for row, index in zip(ids.tolist(), indices.tolist(), strict=True)
            ]
            rows[f"exact/{column}"] = torch.tensor(
                [exact(*pair) for pair in pairs], dtype=torch.float64
            )
            rows[f"f1/{column}"] = torch.tensor([f1(*pair) for pair in pairs], dtype=torch.float64)
            rows[f"answer/{column}"] = ids
        examples = [self._examples[index] for index in indices.tolist()]
        rows["bytes/deflated_size"] = torch.tensor(
            [deflated_size(each.context) for each in examples], dtype=torch.float64
        )
        rows["information"] = torch.tensor([each.bits for each in examples], dtype=torch.float64)
        rows["wire"] = prediction.outputs["wire"][: len(indices)].cpu()
        for name, tensor in {**rows, "index": torch.from_numpy(indices.copy())}.items():
            self._rows.setdefault(name, []).append(tensor)

    def text(self, decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
        """Returns the text before an answer's end."""
        return decode([token for token in ids if token >= 0]).partition(self._end)[0].strip()

    def rows(self) -> dict[str, Tensor]:
        return {name: torch.cat(pieces) for name, pieces in self._rows.items()}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        order = rows["index"].argsort()
        metrics = {name: float(rows[name][order].mean()) for name in self.scalars}
        way = WIRES[int(rows["wire"][0])]
        headline = self._headline(metrics, way)
        text = f"{headline}\n\n{self._table(metrics, len(order))}"
        shares = {column: metrics[f"exact/{column}"] for column in self._columns}
        files = {
            FILE: json.dumps(metrics) + "\n",
            "answers.txt": text + "\n",
            **baselines_scene(shares, len(order), len(self._decode), headline),
            **questions_scene([self._shown(rows, index) for index in order[:SHOWN].tolist()]),
        }
        return Report(metrics, files=files, text=text)

    def _headline(self, metrics: Mapping[str, float], way: str) -> str:
        """Returns a line that compares latents, as they are sent, with the best readable text of at
        most as many bytes.
        """
        size = metrics[f"bytes/{way}"]
        small = [each for each in READABLE if metrics[f"bytes/{each}"] <= size]
        comparisons = []
        for number in range(len(self._decode)):
            ours = metrics[f"exact/{way}/{number}"]
            best = max(small, key=lambda each: metrics[f"exact/{each}/{number}"])
            text = metrics[f"exact/{best}/{number}"]
            comparisons.append(
                f"model {number}: {ours:.1%} against {text:.1%}, {100 * (ours - text):+.1f} points"
            )
        return f"{NAMES[way]}, against the best text of {size:.0f} bytes: {'; '.join(comparisons)}"

    def _table(self, metrics: Mapping[str, float], count: int) -> str:
        models = range(len(self._decode))
        lines = [
            f"{f'answers to {count} questions, from':<{LABEL}}{'bytes':>{BYTES}}"
            + "".join(f"{f'model {each}: exact':>17}{'F1':>7}" for each in models)
        ]
        for way in ANSWER_INPUTS:
            cells = "".join(
                f"{metrics[f'exact/{way}/{each}']:>16.1%} {metrics[f'f1/{way}/{each}']:>6.1%}"
                for each in models
            )
            lines.append(f"{NAMES[way]:<{LABEL}}{metrics[f'bytes/{way}']:>{BYTES}.0f}{cells}")
        deflate = "the whole text, compressed with deflate"
        lines.append(f"{deflate:<{LABEL}}{metrics['bytes/deflated_size']:>{BYTES}.0f}")
        if bits := metrics["information"]:
            held = f"what the text really holds, {bits:.0f} bits"
            lines.append(f"{held:<{LABEL}}{bits / 8:>{BYTES}.0f}")
        return "\n".join(lines)

    def _shown(self, rows: Mapping[str, Tensor], index: int) -> dict[str, Any]:
        """Returns a question with all answers to it, for the report page."""
        example = self._examples[int(rows["index"][index])]
        context = example.context
        answers = []
        for column in self._columns:
            way, _, number = column.rpartition("/")
            given = self.text(self._decode[int(number)], rows[f"answer/{column}"][index].tolist())
            right = bool(rows[f"exact/{column}"][index])
            answers.append(
                {"from": NAMES[way], "model": int(number), "said": given, "right": right}
            )
        return {
            "context": context if len(context) <= CONTEXT else f"{context[:CONTEXT]}…",
            "question": example.question,
            "wanted": list(example.answers[:3]),
            "answers": answers,
        }


def exact(given: str, right: Sequence[str]) -> float:
    """Returns 1 if the answer is right, ignoring case, punctuation, articles and spaces, else 0."""
    return float(any(_plain(given) == _plain(answer) for answer in right))


def f1(given: str, right: Sequence[str]) -> float:
    """Returns the F1 score of the words shared with the closest right answer."""
    return max(_shared(_plain(given).split(), _plain(answer).split()) for answer in right)


def deflated_size(text: str) -> int:
    """Returns the size of a text compressed by deflate, which is gzip without its header."""
    return len(zlib.compress(text.encode(errors="surrogatepass"), 9, wbits=-15))


def _plain(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", letters).split())


def _shared(given: Sequence[str], right: Sequence[str]) -> float:
    if not given or not right:
        return float(given == right)
    both = (Counter(given) & Counter(right)).total()
    return 2 * both / (len(given) + len(right))


def baselines_scene(shares: Mapping[str, float], count: int, models: int, headline: str) -> Files:
    """Draws exact match by `WAY/MODEL` as bars, with 95 % intervals."""
    series = []
    for model in range(models):
        values = [shares[f"{way}/{model}"] for way in ANSWER_INPUTS]
        ends = [wilson(round(value * count), count) for value in values]
        series.append(
            {
                "name": f"model {model}",
                "values": values,
                "low": [low for low, _ in ends],
                "high": [high for _, high in ends],
                "colour": f"c{model % 8 + 1}",
            }
        )
    return scene(
        "answers",
        "bars",
        "Exact match by what the model answers from",
        f"{headline}. {count} questions; whiskers are 95 % intervals (Wilson).",
        x={"values": [NAMES[way] for way in ANSWER_INPUTS]},
        y={"label": "exact match", "percent": True, "min": 0, "max": 1},
        horizontal=True,
        pale=[way not in WIRES for way in ANSWER_INPUTS],
        series=series,
    )


def questions_scene(items: Sequence[Mapping[str, Any]]) -> Files:
    """Shows a few questions with all answers to them."""
    return fitting(
        items,
        lambda some: scene(
            "answers_samples",
            "questions",
            "Questions and answers",
            "The first questions of the set.",
            items=some,
        ),
    )
