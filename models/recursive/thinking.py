"""Records answers and halting after each thinking step of an evaluation, and measures them."""

# B batch, T tokens, V vocabulary, S thinking steps

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from contract import IGNORE, Batch, Prediction, Report
from utils.measure.scene import Files, scene, spread

MOST_RECORDED = 32  # steps whose whole answers are kept


class ByStep:
    """Collects one batch's answers, step by step; `outputs` holds one row per example."""

    def __init__(self, labels_BT: Tensor, halt_max_steps: int) -> None:
        self._labels_BT, self._steps = labels_BT, halt_max_steps
        self._counted_BT = labels_BT != IGNORE
        self._recorded = set(spread(halt_max_steps, MOST_RECORDED))
        self._right_BT: Tensor | None = None
        self._by_step: dict[str, list[Tensor]] = {
            name: [] for name in ("right", "fixed", "broken", "q_halt", "halt_margin")
        }
        self._answers: list[Tensor] = []

    def add(self, logits_BTV: Tensor, q_halt_B: Tensor, margin_B: Tensor) -> None:
        """Compares the answers after one more step with the labels and with the step before."""
        answer_BT = logits_BTV.argmax(-1)
        right_BT = self._counted_BT & (answer_BT == self._labels_BT)
        # how many cells this step put right, and how many it spoiled
        before_BT = right_BT if self._right_BT is None else self._right_BT
        values = {
            "right": right_BT.sum(-1).int(),
            "fixed": (right_BT & ~before_BT).sum(-1).int(),
            "broken": (before_BT & ~right_BT).sum(-1).int(),
            "q_halt": q_halt_B,
            "halt_margin": margin_B,
        }
        for name, value_B in values.items():
            self._by_step[name].append(value_B)
        self._right_BT = right_BT
        # whole answers are large: keep some steps only, in few bytes
        if len(self._by_step["right"]) in self._recorded:
            narrow = torch.uint8 if logits_BTV.shape[-1] <= 256 else torch.int32
            self._answers.append(answer_BT.to(narrow))

    def outputs(self, steps_B: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the outputs of evaluation; a step after all have halted repeats the last one.

        `halt_step` is the step at which each puzzle left (`steps_B`), or without early leaving
        the first at which the net wants to halt; 0 where it never does.
        """
        # puzzles that have all halted keep their last answer, so every batch has the same shape
        unspent = self._steps - len(self._by_step["right"])
        nothing_B = torch.zeros_like(self._by_step["right"][-1])
        by_step = {}
        for name, values in self._by_step.items():
            last = nothing_B if name in ("fixed", "broken") else values[-1]
            by_step[name] = torch.stack(values + [last] * unspent, 1)
        # argmax finds the first step at which the net wants to halt
        wants_BS = by_step["halt_margin"] > 0
        if steps_B is None:
            first_B = wants_BS.int().argmax(1) + 1
            steps_B = torch.where(wants_BS.any(1), first_B, 0)
        lacking = len(self._recorded) - len(self._answers)
        last_answer = [self._answers[-1]] * lacking if lacking else []
        return {f"{name}_by_step": value_BS for name, value_BS in by_step.items()} | {
            "answer_by_step": torch.stack(self._answers + last_answer, 1),
            "halt_step": steps_B,
        }


class ThinkingSteps:
    """Counts in integers, so that the result does not depend on which rank saw which example."""

    scalars: Sequence[str] = ("exact_accuracy_at_1", "exact_accuracy_at_best", "best_step")

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        """Counts this batch's examples. As in the metrics, those without labels count nowhere."""
        rows, outputs = slice(len(indices)), prediction.outputs  # on the device, unlike the batch
        cells_B = (batch["labels"][rows] != IGNORE).sum(-1)
        right_BS = outputs["right_by_step"][rows].cpu()
        q_halt_BS = outputs["q_halt_by_step"][rows].cpu()
        valid_B1 = (cells_B > 0)[:, None]
        solved_BS = valid_B1 & (right_BS == cells_B[:, None])
        halt_B, steps = outputs["halt_step"][rows].cpu().long(), right_BS.shape[1]
        # counts by step, and halting steps by whether the last answer is right
        counts = {
            "examples": valid_B1.sum(0),
            "cells": cells_B.sum(0, keepdim=True),
            "right": right_BS.long().sum(0),
            "solved": solved_BS.sum(0),
            "halting": (valid_B1 & (q_halt_BS >= 0)).sum(0),
            "fixed": outputs["fixed_by_step"][rows].cpu().long().sum(0),
            "broken": outputs["broken_by_step"][rows].cpu().long().sum(0),
            "halt_solved": halt_B[solved_BS[:, -1]].bincount(minlength=steps + 1),
            "halt_unsolved": halt_B[valid_B1[:, 0] & ~solved_BS[:, -1]].bincount(
                minlength=steps + 1
            ),
        }
        self._sums = {name: count + self._sums.get(name, 0) for name, count in counts.items()}

    def rows(self) -> dict[str, Tensor]:
        """Returns one row: this rank's counts."""
        return {name: count[None] for name, count in self._sums.items()}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Reports shares by step as scenes, and metrics of the first and best step."""
        if not rows or not int(rows["examples"].sum()):
            return Report()
        sums = {name: count.sum(0).to(torch.float64) for name, count in rows.items()}
        # from counts to shares, once all ranks have added theirs
        shares = {
            "cell_accuracy": sums["right"] / sums["cells"],
            "exact_accuracy": sums["solved"] / sums["examples"],
            "halting": sums["halting"] / sums["examples"],
        }
        lines = {name: share.tolist() for name, share in shares.items()}
        exact = lines["exact_accuracy"]
        best = exact.index(max(exact))
        return Report(
            metrics=dict(zip(self.scalars, (exact[0], exact[best], best + 1.0), strict=True)),
            files=_scenes(sums, lines),
        )


def _scenes(sums: Mapping[str, Tensor], lines: Mapping[str, list[float]]) -> Files:
    """The same by step for the report page, with fixed and broken cells and halting steps."""
    steps = list(range(1, len(lines["exact_accuracy"]) + 1))
    examples = float(sums["examples"])
    shares = [
        ("boards solved", "exact_accuracy", "good"),
        ("cells right", "cell_accuracy", "c1"),
        ("wants to halt", "halting", "c2"),
    ]
    axis = {"label": "thinking step", "values": steps}
    # how accuracy rises with more thinking
    scenes = scene(
        "thinking_steps",
        "lines",
        "Accuracy by thinking step",
        "What the net would have answered had it been stopped after each step.",
        x=axis,
        y={"label": "share of examples, or of cells", "percent": True, "min": 0, "max": 1},
        lines=[
            {"name": label, "values": lines[name], "colour": colour}
            for label, name, colour in shares
        ],
    )
    # whether later steps still repair cells, or break as many as they repair
    scenes |= scene(
        "thinking_steps_cells",
        "bars",
        "Cells fixed and broken by step",
        "Cells per example that became right, or became wrong, since the step before.",
        x={"label": "thinking step", "values": steps[1:]},
        y={"label": "cells per example"},
        diverging=True,
        series=[
            {"name": name, "values": (sums[name][1:] / examples).tolist(), "colour": colour}
            for name, colour in (("fixed", "good"), ("broken", "bad"))
        ],
    )
    # whether the net stops early where it is right; step 0, which means never, is shown last
    return scenes | scene(
        "thinking_steps_halting",
        "bars",
        "Halting steps",
        "The first step at which the net halts, or wants to; by whether its last answer is right.",
        x={"label": "thinking step", "values": [*steps, "never"]},
        y={"label": "examples"},
        series=[
            {"name": name, "values": torch.roll(sums[key], -1).tolist(), "colour": colour}
            for name, key, colour in (
                ("solved", "halt_solved", "good"),
                ("unsolved", "halt_unsolved", "bad"),
            )
        ],
    )
