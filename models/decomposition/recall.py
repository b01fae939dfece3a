"""The objective of nets that recall a token at the end of a text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition.induction import InductionHeads
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.measure.evaluator import Prediction
from utils.measure.metrics import Metric
from utils.spec import IGNORE


class Recall(Objective):
    """Sums the cross entropy of the token that follows each text."""

    headline = Metric("accuracy")
    costs = frozenset({"loss"})
    model: InductionHeads

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        logits_BV = self._logits(batch)
        nats = F.cross_entropy(logits_BV, batch["answer"].long(), reduction="sum")
        return StepOut(nats, torch.full((), len(logits_BV), device=nats.device), {})

    def predict(self, batch: Batch) -> Prediction:
        """Reports the share of tokens that are the likeliest, and the cross entropy."""
        logits_BV, answer_B = self._logits(batch), batch["answer"].long()
        counted_B = batch["labels"][:, -1] != IGNORE
        nats_B = F.cross_entropy(logits_BV, answer_B, reduction="none")
        right_B = logits_BV.argmax(-1) == answer_B
        sums = {"accuracy": right_B, "loss": nats_B}
        return Prediction(
            {name: ((each_B * counted_B).sum(), counted_B.sum()) for name, each_B in sums.items()}
        )

    def _logits(self, batch: Batch) -> Tensor:
        return self.model.logits(self.model(batch["inputs"])[:, -1])
