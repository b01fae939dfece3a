"""Shows on the report page how well questions are answered from latents and from baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from utils.latent import ANSWER_INPUTS, WIRES
from utils.measure.metrics import wilson
from utils.measure.scene import Files, fitting, scene

CONTEXT = 600  # characters of a text that are shown


def baselines_scene(
    shares: Mapping[str, float], count: int, models: int, names: Mapping[str, str], headline: str
) -> Files:
    """Exact match for each thing answered from (`WAY/MODEL`), with 95 % intervals, as bars."""
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
        x={"values": [names[way] for way in ANSWER_INPUTS]},
        y={"label": "exact match", "percent": True, "min": 0, "max": 1},
        horizontal=True,
        pale=[way not in WIRES for way in ANSWER_INPUTS],
        series=series,
    )


def questions_scene(items: Sequence[Mapping[str, Any]]) -> Files:
    """A few questions, each with what was answered from what, and whether it is right."""
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


def shorten(text: str) -> str:
    """As much of a text as the page shows."""
    return text if len(text) <= CONTEXT else text[:CONTEXT] + "…"
