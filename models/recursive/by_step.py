"""Records the answer and the wish to halt after each thinking step of an evaluation."""

# B batch, T tokens, V vocabulary, S thinking steps, R recorded steps

from __future__ import annotations

import torch
from torch import Tensor

from utils.measure.scene import spread
from utils.spec import IGNORE

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
        """Takes in what the net says after one more step."""
        answer_BT = logits_BTV.argmax(-1)
        right_BT = self._counted_BT & (answer_BT == self._labels_BT)
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
        if len(self._by_step["right"]) in self._recorded:
            narrow = torch.uint8 if logits_BTV.shape[-1] <= 256 else torch.int32
            self._answers.append(answer_BT.to(narrow))

    def outputs(self, steps_B: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the outputs of evaluation; a step after all have halted repeats the last one.

        `halt_step` is the step at which each puzzle left (`steps_B`), or without early leaving
        the first at which the net wants to halt; 0 where it never does.
        """
        unspent = self._steps - len(self._by_step["right"])
        nothing_B = torch.zeros_like(self._by_step["right"][-1])
        by_step = {}
        for name, values in self._by_step.items():
            last = nothing_B if name in ("fixed", "broken") else values[-1]
            by_step[name] = torch.stack(values + [last] * unspent, 1)
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
