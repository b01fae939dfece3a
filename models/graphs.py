"""Copies what must outlive a replay of CUDA graphs: a later replay overwrites a net's outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.registry import map_tensors


def keep_what_outlives_a_replay(objective: Any) -> None:
    """Makes every training pass and every prediction begin a new round of replays.

    Carries and gradients of table rows outlive a round as copies; dense gradients go into their
    buckets at once. Without rounds, each call of the net would be captured as one that follows all
    others.
    """
    begin_round = torch.compiler.cudagraph_mark_step_begin
    objective.register_forward_pre_hook(lambda *_: begin_round())
    objective.register_forward_hook(lambda module, given, out: replace(out, carry=_copy(out.carry)))
    for table in objective.tables().values():
        table.register_forward_hook(lambda module, given, rows: _with_a_gradient_of_its_own(rows))
    predict = objective.predict

    def predict_in_a_round(batch: Any) -> Any:
        begin_round()
        return predict(batch)

    objective.predict = predict_in_a_round


def _with_a_gradient_of_its_own(rows: Tensor) -> None:
    """Copies the gradient: autograd keeps the tensor it is given if nothing else refers to it."""

    def copy_gradient(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad = leaf.grad.clone()

    if rows.requires_grad:
        rows.register_post_accumulate_grad_hook(copy_gradient)


def _copy(carry: Any) -> Any:
    return map_tensors(lambda name, tensor: tensor.clone(), carry)
