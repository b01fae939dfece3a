"""Shows on the report page how a few puzzles are solved, step by step."""

# N examples, S recorded steps

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract import IGNORE, Batch, Prediction, Report
from data.recursive.grids import Task
from data.recursive.puzzle_text import characters
from data.recursive.sudoku import BOXES
from utils.measure.scene import Files, fitting, scene, spread

SHOWN = 4  # solved examples, and as many unsolved ones
# characters that one changed cell takes, against one for each cell of a whole answer
PER_CHANGE = 8
TITLES = {
    "sudoku": "Boards, cell by cell",
    "maze": "Mazes, cell by cell",
    "grid": "Grids, cell by cell",
}
OUTPUTS = ("answer_by_step", "halt_margin_by_step", "halt_step")
CAPTION = (
    "The net's answer after each thinking step: solved examples that took the most steps, and the"
    " first unsolved ones."
)


class Boards:
    """Keeps the solved Sudoku boards, mazes or grids that took the most steps, and the first
    unsolved ones.
    """

    scalars: Sequence[str] = ()

    def __init__(self, kind: str, task: Task | None = None) -> None:
        self._kind, self._task = kind, task
        self._kept: dict[bool, list[dict[str, Tensor]]] = {True: [], False: []}  # by solved or not

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Keeps the examples of a batch that rank before those kept so far."""
        outputs = prediction.outputs
        if not {*OUTPUTS, "right_by_step"} <= outputs.keys():
            return
        rows = slice(len(indices))
        # a board is solved if all its cells are right; the steps before that show how hard it was
        cells_N = (batch["labels"][rows] != IGNORE).sum(-1)
        solved_NS = outputs["right_by_step"][rows].cpu() == cells_N[:, None]
        # steps in which a solved example was still unsolved; of unsolved ones, the first are shown
        waited_N = torch.where(solved_NS[:, -1], (~solved_NS).sum(1), 0).numpy()
        for solved, kept in self._kept.items():
            of_this_sort = np.flatnonzero((cells_N > 0) & (solved_NS[:, -1] == solved))
            by_rank = np.lexsort((indices[of_this_sort], -waited_N[of_this_sort]))
            last = _rank(kept[-1]) if len(kept) == SHOWN else None
            for row in of_this_sort[by_rank[:SHOWN]].tolist():
                rank = -int(waited_N[row]), int(indices[row])
                if last is not None and rank > last:
                    break  # before anything is copied from a GPU
                example = {name: outputs[name][row].cpu() for name in OUTPUTS}
                example |= {name: batch[name][row].cpu() for name in ("inputs", "labels")}
                example |= {"waited": torch.tensor(-rank[0]), "index": torch.tensor(rank[1])}
                kept.append(example | {"solved": torch.tensor(solved)})
            kept.sort(key=_rank)
            del kept[SHOWN:]

    def rows(self) -> dict[str, Tensor]:
        kept = self._kept[True] + self._kept[False]
        return {name: torch.stack([row[name] for row in kept]) for name in kept[0]} if kept else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """The first of all ranks' examples: the same at any number of ranks."""
        if not rows:
            return Report()
        order = np.lexsort((rows["index"].numpy(), -rows["waited"].numpy()))
        chosen = order[in_turn(rows["solved"][order].tolist(), SHOWN)].tolist()

        def drawn(numbers: Sequence[int]) -> Files:
            examples = {name: tensor[list(numbers)] for name, tensor in rows.items()}
            return boards_scene(self._kind, examples, self._task)

        return Report(files=fitting(chosen, drawn))


def in_turn(solved: Sequence[bool], most: int) -> list[int]:
    """Returns the places of the first `most` solved and unsolved ones in turn: a list that is cut
    short has both.
    """
    places = range(len(solved))
    first = [place for place in places if solved[place]][:most]
    second = [place for place in places if not solved[place]][:most]
    pairs = zip_longest(first, second)
    return [place for pair in pairs for place in pair if place is not None]


def boards_scene(kind: str, rows: Mapping[str, Tensor], task: Task | None = None) -> Files:
    """Puzzles with their answers by step, one in each row; solved ones are shown first."""
    cells = rows["inputs"].shape[1]
    side = task.columns if task else round(cells**0.5)
    steps, recorded = rows["halt_margin_by_step"].shape[1], rows["answer_by_step"].shape[1]
    # solved ones first, each kind in the order in which it was chosen
    solved = rows["solved"].tolist()
    shown = sorted(range(len(solved)), key=lambda row: not solved[row])
    return scene(
        "boards",
        "boards",
        TITLES[kind],
        CAPTION,
        board=kind,
        side=side,
        rows=cells // side,
        box=list(BOXES[side]) if kind == "sudoku" else None,
        steps=spread(steps, recorded),
        examples=[
            example(kind, {name: tensor[row].numpy() for name, tensor in rows.items()}, task)
            for row in shown
        ],
    )


def _rank(row: Mapping[str, Tensor]) -> tuple[int, int]:
    return -int(row["waited"]), int(row["index"])


def example(kind: str, row: Mapping[str, np.ndarray], task: Task | None = None) -> dict[str, Any]:
    """Describes one puzzle: inputs, labels, and the answer and halting value by step."""
    labels = np.where(row["labels"] == IGNORE, -1, row["labels"])
    # answers in characters, of which all but the first are stored as changes: pages stay small
    answers = [
        characters(kind, task.shown(answer) if task else answer) for answer in row["answer_by_step"]
    ]
    margins = row["halt_margin_by_step"].astype(np.float64)
    halting = 1 / (1 + np.exp(-margins.clip(-500, 500)))  # beyond, exp overflows
    recorded = np.array(spread(len(halting), len(answers))) - 1
    return {
        "index": int(row["index"]),
        "solved": bool(row["solved"]),
        "inputs": characters(kind, row["inputs"]),
        "labels": characters(kind, labels),
        "answers": [answers[0], *map(change, answers, answers[1:])],
        "halting": halting[recorded].tolist(),
        "halt_step": int(row["halt_step"]),
    }


def change(before: str, after: str) -> str | dict[str, str]:
    """Returns the whole answer, or the changed cells if that is shorter."""
    changed = {
        str(cell): new
        for cell, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    }
    return changed if len(changed) * PER_CHANGE < len(after) else after
