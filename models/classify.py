"""Classification by cross entropy, for any net that turns a batch of inputs into logits."""

# B batch, C classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from models.interval import Interval
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.measure.evaluator import Evaluator, Prediction
from utils.measure.metrics import MetricSums
from utils.spec import IGNORE


class ClassifyObjective(Objective):
    """Sums the cross entropy over examples."""

    costs = frozenset({"loss"})

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        loss, weight, metrics = self.score(widen(self.call_net(batch["inputs"])), batch["labels"])
        return StepOut(loss, weight, {"accuracy": metrics["accuracy"]})

    def predict(self, batch: Batch) -> Prediction:
        logits_BC = widen(self.call_net(batch["inputs"]))
        _, _, metrics = self.score(logits_BC, batch["labels"])
        return Prediction(metrics, {"logits": logits_BC, "answer": logits_BC.argmax(-1)})

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        return [Interval(self.headline.name)]

    def score(self, logits_BC: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor, MetricSums]:
        loss = F.cross_entropy(logits_BC, labels_B.long(), ignore_index=IGNORE, reduction="sum")
        weight = (labels_B != IGNORE).sum()
        right = (logits_BC.argmax(-1) == labels_B).sum()
        return loss, weight, {"loss": (loss.detach(), weight), "accuracy": (right, weight)}
