"""Hierarchical Reasoning Model (Wang et al. 2025, arXiv 2506.21734): a fast low level under a slow
high level.
"""

# B batch, L positions, D width; z_H and z_L are states

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contract import Spec
from models.layers import CosSin, Layers
from models.recursive.recursion import RecursiveNet, State
from models.recursive.sequence import SequenceInner, SequenceSizes


class HRMSizes(SequenceSizes):
    H_layers: Layers
    """Blocks of the high level"""


class HRMInner(SequenceInner):
    """H_cycles × (L_cycles low passes, one high pass). Only the last pass of each level has
    gradients.
    """

    def __init__(self, sizes: SequenceSizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        self.H_level = self.stack(sizes.H_layers)
        self.L_level = self.stack(sizes.L_layers)

    def recur(
        self, state: State, x_BLD: Tensor, cos_sin: CosSin | None, noise: Iterator[Tensor]
    ) -> State:
        z_H, z_L = state
        high, low = self.sizes.H_cycles, self.sizes.L_cycles
        # the paper's one-step gradient: what came before the last passes is taken as given
        with torch.no_grad():
            for round_ in range(high):
                injected = z_H + x_BLD
                last_round = round_ == high - 1
                for _ in range(low - last_round):
                    z_L = self.L_level(z_L, injected, cos_sin, next(noise, None))
                if not last_round:
                    z_H = self.H_level(z_H, z_L, cos_sin, next(noise, None))
        z_L = self.L_level(z_L, z_H + x_BLD, cos_sin, next(noise, None))
        return self.H_level(z_H, z_L, cos_sin, next(noise, None)), z_L


class HRM(RecursiveNet):
    """HRM with adaptive computation time (ACT v1)."""

    def __init__(self, spec: Spec, keys: HRMSizes) -> None:
        super().__init__(HRMInner(keys, spec))
