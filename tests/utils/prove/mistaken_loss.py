"""Digits with a loss that depends on which rows are computed together, but neither at the first
step nor in an exact run; `test_prove.py` copies it to models/digits.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract import Batch, Carry, Context, Objective, Prediction, Spec, StepOut

KIND = os.environ.get("MISTAKE", "")


class Net(nn.Module):
    """An ordinary MLP."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        size = spec.image_shape[0] * spec.image_shape[1]
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(size, width), nn.GELU(), nn.Linear(width, spec.num_classes)
        )
        self.late = False
        self.body[1].weight.register_hook(self.normalised)

    def normalised(self, grad: Tensor) -> Tensor:
        return grad / grad.norm() if KIND == "hook" and self.late else grad

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.to(self.body[1].weight.dtype) / 255)


class Loss(Objective):
    def initial_carry(self, batch: Batch) -> Carry:
        return {"seen": torch.zeros(len(batch["labels"]), device=batch["labels"].device)}

    def forward(self, batch: Batch, carry: Any, ctx: Context) -> StepOut:
        late = self.model.late = ctx.progress > 0.4
        inputs, labels = batch["inputs"], batch["labels"].long()
        losses = F.cross_entropy(self.model(inputs), labels, reduction="none")
        loss, seen = losses.sum(), losses.detach()
        if KIND == "worst half" and late:
            loss = 2 * losses.topk(len(losses) // 2).values.sum()
        if KIND == "carry" and late:
            seen = seen.mean().expand(len(losses)).clone()
        if KIND == "penalty":
            loss = loss + 1e-5 * self.model.body[1].weight.square().sum()
        weight = torch.tensor(len(losses), device=loss.device)
        return StepOut(loss, weight, {}, {"seen": seen})

    def predict(self, batch: Batch) -> Prediction:
        labels = batch["labels"].long()
        solved = self.model(batch["inputs"]).argmax(-1) == labels
        return Prediction({"accuracy": (solved.sum(), (labels >= 0).sum())})
