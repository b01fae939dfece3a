"""CUDA graphs under torch.compile: what a net returns lies where a later replay writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from utils.checkpoint import nested


def keep_what_outlives_a_replay(objective: Any) -> None:
    """Every training pass and every prediction begins a new round of replays, and carries, which outlive it, become copies.

    Without the rounds, each call of the net would be captured as another one that follows all before it.
    """
    begin_round = torch.compiler.cudagraph_mark_step_begin
    objective.register_forward_pre_hook(lambda *_: begin_round())
    objective.register_forward_hook(lambda module, given, out: replace(out, carry=_copied(out.carry)))
    predict = objective.predict

    def predict_in_a_round(batch: Any) -> Any:
        begin_round()
        return predict(batch)

    objective.predict = predict_in_a_round


def _copied(carry: Any) -> Any:
    return nested.rebuild(carry, {name: tensor.clone() for name, tensor in nested.flatten(carry).items()})
