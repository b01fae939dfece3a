"""Boards by thinking step for the report page."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from data.recursive.boards import SHOWN, Boards
from tests.data.helpers import reported

SOLUTION = "1234341221434321"
GIVEN = "12..3.1.2.4..32."
STEPS = [SOLUTION.replace("34", "43"), "1234341221434324", SOLUTION]


def tokens(board: str) -> list[int]:
    """A 4×4 Sudoku as the net sees it."""
    return [1 if cell == "." else int(cell) + 1 for cell in board]


def evaluated(indices: list[int], unsolved: set[int]) -> tuple:
    """A batch of copies of the board above, padded with one more. Those in `unsolved` end with the
    first wrong answer; of the others, even ones are right a step sooner.
    """
    count = len(indices) + 1
    solution = torch.tensor(tokens(SOLUTION)).expand(count, -1)
    answers = torch.tensor([tokens(step) for step in STEPS], dtype=torch.uint8)
    answers = answers.expand(count, -1, -1).clone()
    for row, index in enumerate(indices):
        if index in unsolved:
            answers[row, 2] = answers[row, 0]
        elif index % 2 == 0:
            answers[row, 1] = answers[row, 2]
    batch = {"inputs": torch.tensor(tokens(GIVEN)).expand(count, -1), "labels": solution.clone()}
    outputs = {
        "answer_by_step": answers,
        "right_by_step": (answers == solution[:, None]).sum(-1),
        "halt_margin_by_step": torch.tensor([-2.0, 0.0, 2.0]).expand(count, -1),
        "halt_step": torch.full((count,), 2),
    }
    return np.array(indices), batch, outputs


def shown(examples: list[int], unsolved: set[int]) -> dict[str, Any]:
    """Returns the scene of these examples in batches of 3."""
    parts = [examples[start : start + 3] for start in range(0, len(examples), 3)]
    report = reported(Boards("sudoku"), *(evaluated(part, unsolved) for part in parts))
    return json.loads(report.files["boards.scene.json"])


def test_a_board_by_step() -> None:
    made = shown([7], set())
    head = [made[key] for key in ("kind", "board", "side", "box", "steps")]
    assert head == ["boards", "sudoku", 4, [2, 2], [1, 2, 3]]
    assert made["examples"] == [
        {
            "index": 7,
            "solved": True,
            "inputs": GIVEN,
            "labels": SOLUTION,
            # one changed cell is shorter said alone than in a whole board
            "answers": [STEPS[0], STEPS[1], {"15": "1"}],
            "halting": [0.1192, 0.5, 0.8808],
            "halt_step": 2,
        }
    ]


@pytest.mark.parametrize("unsolved", [set(), {0, 3, 7, 8, 11}, set(range(14))])
def test_as_many_of_each_sort_are_shown(unsolved: set[int]) -> None:
    examples = list(range(14))
    made = shown([*examples[3:6], *examples[:3], *examples[6:]], unsolved)
    kept = [each["index"] for each in made["examples"]]
    solved = [index for index in examples if index not in unsolved]
    solved.sort(key=lambda index: (index % 2 == 0, index))
    assert kept == solved[:SHOWN] + sorted(unsolved)[:SHOWN]
