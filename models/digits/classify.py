"""Image classification by cross entropy."""

# B batch, C classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from models.digits.cnn import CNN
from models.interval import Interval
from models.layers import cast_weights, widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.measure.evaluator import Evaluator, Prediction
from utils.measure.metrics import MetricSums
from utils.spec import IGNORE


class ClassifyObjective(Objective):
    """Sums the cross entropy over examples."""

    costs = frozenset({"loss"})
    model: CNN

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        loss, weight, metrics = self.score(self._logits(batch), batch["labels"])
        return StepOut(loss, weight, {"accuracy": metrics["accuracy"]})

    def predict(self, batch: Batch) -> Prediction:
        logits_BC = self._logits(batch)
        _, _, metrics = self.score(logits_BC, batch["labels"])
        return Prediction(metrics, {"logits": logits_BC, "answer": logits_BC.argmax(-1)})

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        return [Interval(self.headline.name)]

    def _logits(self, batch: Batch) -> Tensor:
        dtype = self.dtype
        # the mean and the standard deviation of MNIST's pixels
        images = ((batch["inputs"].unsqueeze(1).float() - 33.3) / 78.6).to(dtype)
        return widen(functional_call(self.model, cast_weights(self.model, dtype), (images,)))

    def score(self, logits_BC: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor, MetricSums]:
        loss = F.cross_entropy(logits_BC, labels_B.long(), ignore_index=IGNORE, reduction="sum")
        weight = (labels_B != IGNORE).sum()
        right = (logits_BC.argmax(-1) == labels_B).sum()
        return loss, weight, {"loss": (loss.detach(), weight), "accuracy": (right, weight)}
