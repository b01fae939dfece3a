"""Classification by cross entropy, for any net that turns a batch of inputs into logits."""

# B batch, C classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from contract import (
    IGNORE,
    Batch,
    Carry,
    Context,
    Evaluator,
    Objective,
    Prediction,
    StepOut,
)
from models.interval import Interval
from models.layers import widen


class ClassifyObjective(Objective):
    """Sums the cross entropy over examples. For another loss on the same batches, override `score`,
    which training and evaluations share.
    """

    costs = frozenset({"loss"})

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        _, loss, weight, metrics = self.score(batch)
        return StepOut(loss, weight, metrics)

    def predict(self, batch: Batch) -> Prediction:
        logits_BC, _, _, metrics = self.score(batch)
        return Prediction(metrics, {"logits": logits_BC, "answer": logits_BC.argmax(-1)})

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        return [Interval("accuracy")]

    def score(
        self, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]:
        """Returns logits, the sum of the loss, its weight, and metrics as (sum, count)."""
        logits_BC, labels_B = widen(self.call_net(batch["inputs"])), batch["labels"]
        loss = F.cross_entropy(logits_BC, labels_B.long(), ignore_index=IGNORE, reduction="sum")
        weight = (labels_B != IGNORE).sum()
        # examples with the label IGNORE count neither as right nor in the weight
        right = (logits_BC.argmax(-1) == labels_B).sum()
        metrics = {"loss": (loss.detach(), weight), "accuracy": (right, weight)}
        return logits_BC, loss, weight, metrics
