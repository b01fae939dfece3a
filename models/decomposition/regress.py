"""The objective of toy models, whose net says which outputs are right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from models.decomposition.toy import Toy
from models.layers import cast_weights, widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.measure.evaluator import Prediction
from utils.measure.metrics import Metric
from utils.spec import IGNORE


class Regress(Objective):
    """Sums the mean squared error of each example."""

    headline = Metric("loss", lower_is_better=True)
    model: Toy

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        errors_B = self._errors(batch["inputs"])[0]
        return StepOut(errors_B.sum(), torch.full((), len(errors_B), device=errors_B.device), {})

    def predict(self, batch: Batch) -> Prediction:
        """Reports a mean loss, except for examples with a single feature."""
        errors_B, answer_BN = self._errors(batch["inputs"])
        counts_B = batch["labels"] != IGNORE
        metrics = (
            {} if "single" in batch else {"loss": ((errors_B * counts_B).sum(), counts_B.sum())}
        )
        return Prediction(metrics, {"answer": answer_BN})

    def _errors(self, inputs_BN: Tensor) -> tuple[Tensor, Tensor]:
        x_BN = inputs_BN.to(self.dtype)
        answer_BN = widen(
            functional_call(self.model, cast_weights(self.model, x_BN.dtype), (x_BN,))
        )
        return (answer_BN - self.model.wanted(widen(x_BN))).square().mean(-1), answer_BN
