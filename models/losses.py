"""Cross entropies of each cell, zero where the label is to be ignored.

`smoothing` is the share of the target that is spread over all tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import widen
from utils.spec import IGNORE


def stablemax_cross_entropy(
    logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Returns the cross entropy under stablemax (Prieto et al. 2025), in float64.

    Scores are linear above zero and reciprocal below.
    """
    x = logits_BTV.double()
    scores = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    counted = labels_BT != IGNORE
    index = torch.where(counted, labels_BT, 0).long().unsqueeze(-1)
    target = scores.gather(-1, index).squeeze(-1).log()
    if smoothing:
        target = torch.lerp(target, scores.log().mean(-1), smoothing)
    return torch.where(counted, scores.sum(-1).log() - target, 0.0)


def softmax_cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the usual cross entropy."""
    logits, labels = widen(logits_BTV).flatten(0, -2), labels_BT.long().flatten()
    return F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    ).view(labels_BT.shape)


LOSSES = {loss.__name__: loss for loss in (stablemax_cross_entropy, softmax_cross_entropy)}
