"""Cross entropies per cell, zero where the label is to be ignored; `smoothing` is the share of the target spread over all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import widen
from utils.spec import IGNORE


def stablemax_cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy under stablemax (Prieto et al. 2025): linear above zero, reciprocal below, hence float64."""
    x = logits_BTV.double()
    scores = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    counted = labels_BT != IGNORE
    chosen = scores.gather(-1, torch.where(counted, labels_BT, 0).long().unsqueeze(-1)).squeeze(-1)
    target = torch.lerp(chosen.log(), scores.log().mean(-1), smoothing) if smoothing else chosen.log()
    return torch.where(counted, scores.sum(-1).log() - target, 0.0)


def softmax_cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """The usual cross entropy."""
    logits, labels = widen(logits_BTV).flatten(0, -2), labels_BT.long().flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing).view(labels_BT.shape)


LOSSES = {loss.__name__: loss for loss in (stablemax_cross_entropy, softmax_cross_entropy)}
