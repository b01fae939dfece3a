"""Shows a few ARC test pairs on the report page: the input, the two best answers, the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.recursive.arc import FIRST, SIDE, undone
from utils.measure.scene import Files, fitting, scene

SHOWN = 4  # pairs that one of the answers solves, and as many that none does
ANSWERS = 2
CAPTION = (
    "The two answers with the most votes over all augmentations. Pairs are shown in their order."
)


def in_turn(solved: Sequence[bool], most: int = SHOWN) -> list[int]:
    """The first of each sort, in turn, so that a short list has both."""
    sorts = [
        [index for index, each in enumerate(solved) if each == sort][:most]
        for sort in (True, False)
    ]
    return [one for index in range(most) for sort in sorts for one in sort[index : index + 1]]


def arc_scene(pairs: Sequence[Mapping[str, Any]]) -> Files:
    """Pairs as `shown_pair` makes them, the more important first; as many as there is room for."""
    return fitting(pairs, lambda some: scene("arc", "arc", "ARC test pairs", CAPTION, pairs=some))


def shown_pair(
    name: str,
    given: list[list[int]],
    truth: list[list[int]] | None,
    answers: Sequence[Mapping[str, Any]],
    votes: int,
) -> dict[str, Any]:
    """One pair; `answers` have a grid, votes and a confidence, the best first."""
    return {
        "name": name,
        "input": lines(given),
        "truth": None if truth is None else lines(truth),
        "answers": [
            {
                **answer,
                "grid": lines(answer["grid"]),
                "right": None if truth is None else answer["grid"] == truth,
            }
            for answer in answers
        ],
        "votes": votes,
    }


def lines(grid: list[list[int]]) -> list[str]:
    """A digit for each cell."""
    return ["".join(map(str, row)) for row in grid]


def grids_of(canvases: np.ndarray) -> list[list[list[int]]]:
    """Grids without the rest of their canvases (N, 900)."""
    count = len(canvases)
    same = np.tile(np.arange(10), (count, 1))
    tokens, tall, wide = undone(canvases.astype(np.uint8), np.zeros(count, int), same)
    squares = tokens.reshape(-1, SIDE, SIDE).astype(int) - FIRST
    return [
        square[: int(height), : int(width)].tolist()
        for square, height, width in zip(squares, tall.ravel(), wide.ravel(), strict=True)
    ]
