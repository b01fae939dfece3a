"""Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv 2510.04871): one small stack serves both
levels.
"""

# B batch, L positions, D width; z_H and z_L are states

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contract import Spec
from models.layers import CosSin
from models.recursive.recursion import RecursiveNet, State
from models.recursive.sequence import SequenceInner, SequenceSizes


class TRMInner(SequenceInner):
    """Refines the scratchpad z_L several times, then the answer z_H once, in each round. Only the
    last round has gradients.
    """

    def __init__(self, sizes: SequenceSizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        self.L_level = self.stack(sizes.L_layers)

    def recur(
        self, state: State, x_BLD: Tensor, cos_sin: CosSin | None, noise: Iterator[Tensor]
    ) -> State:
        # the earlier rounds only bring the state closer to an answer; the last one is trained
        with torch.no_grad():
            for _ in range(self.sizes.H_cycles - 1):
                state = self.one_round(state, x_BLD, cos_sin, noise)
        return self.one_round(state, x_BLD, cos_sin, noise)

    def one_round(
        self, state: State, x_BLD: Tensor, cos_sin: CosSin | None, noise: Iterator[Tensor]
    ) -> State:
        """Refines z_L `L_cycles` times, then z_H once."""
        # z_L reasons about question and answer; z_H never sees the question itself
        z_H, z_L = state
        question_and_answer = z_H + x_BLD
        for _ in range(self.sizes.L_cycles):
            z_L = self.L_level(z_L, question_and_answer, cos_sin, next(noise, None))
        return self.L_level(z_H, z_L, cos_sin, next(noise, None)), z_L


class TRM(RecursiveNet):
    """TRM with attention, or with token-mixing MLPs (`mlp_t`)."""

    def __init__(self, spec: Spec, keys: SequenceSizes) -> None:
        super().__init__(TRMInner(keys, spec))
