"""A net that guesses and searches as `SudokuNet` does, and learns which cells have to do with each
other: a candidate is a digit in a cell, as in LDT (arXiv 2605.08605).
"""

# B boards, T cells, N digits, D width, F hidden width

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import Doc

from contract import Spec
from models.layers import ForwardDtype, Layers, Width
from models.recursive.sudoku_net import EPS, Expansion, OptionInner, Passes, SudokuNet
from models.recursive.symbols import SymbolBlock


class CandidateInner(OptionInner):
    """Candidates hear of those with the same digit in other cells, and of those of their cell."""

    def __init__(self, side: int, width: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__(side, width, hidden)
        blocks = [
            SymbolBlock(width, hidden, heads, side, EPS, mlp_norm=True) for _ in range(layers)
        ]
        with torch.no_grad():  # a pass changes little at first; else many passes learn nothing
            for block in blocks:
                block.down_proj.weight.mul_(0.1)
        self.layers = nn.ModuleList(blocks)
        self.add_heads(width)

    def one_pass(self, z_BTND: Tensor, known_BTNF: Tensor) -> Tensor:
        for block in self.layers:
            z_BTND = block(z_BTND, known_BTNF)
        return z_BTND


class CandidateNet(SudokuNet):
    """Knows that digits are alike and cells lie on a grid, and no rule."""

    def __init__(
        self,
        spec: Spec,
        hidden_size: Width,
        expansion: Expansion,
        num_heads: Annotated[PositiveInt, Doc("ways in which cells hear other cells")],
        num_layers: Annotated[Layers, Doc("blocks that a pass goes through")],
        passes: Passes,
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__(spec, passes, forward_dtype)
        hidden = max(1, round(expansion * hidden_size))
        self.inner = CandidateInner(self.side, hidden_size, hidden, num_heads, num_layers)
