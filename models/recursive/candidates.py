"""A net for Sudoku that keeps a state for each candidate, a digit in a cell, as LDT does
(arXiv 2605.08605). With `guessing` and `search`, it guesses and backtracks.

All candidates share their weights, so that a board with other digits in the same places gets the
same answer in those digits, and the number of weights hardly depends on the size of the board.
"""

# B boards, T cells, N digits, D width, F hidden width, H heads

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import Doc

from contract import Spec
from models.layers import (
    ForwardDtype,
    Layers,
    Linear,
    Width,
    cast_weights,
    lecun_normal,
    parse_dtype,
)
from models.recursive.symbols import GridMixer, Mixer, SymbolBlock
from utils.errors import ConfigError

BLANK = 1  # digit d is token d + 1, pad is 0
OPEN, GIVEN, GUESSED, EXCLUDED = range(4)  # what is known of a candidate
EPS = 1e-6


class UnitMixer(Mixer):
    """A head each for the cells of a row, of a column and of a box."""

    weight_HTT: Tensor

    def __init__(self, width: int, side: int) -> None:
        # rows, columns and boxes each get a third of the width
        if width % 3:
            raise ConfigError(
                f"arch.hidden_size={width}: is not a multiple of 3, as arch.num_heads=null needs"
                " for rows, columns and boxes"
            )
        super().__init__(width, 3)
        # boxes are as close to square as possible, and no higher than wide
        height = next(height for height in range(math.isqrt(side), 0, -1) if side % height == 0)
        row_T, column_T = torch.arange(side**2) // side, torch.arange(side**2) % side
        box_T = row_T // height * height + column_T // (side // height)
        # two cells exchange messages if they are in the same unit; dividing by √side keeps the
        # variance
        unit_HT = torch.stack((row_T, column_T, box_T))
        weight_HTT = side**-0.5 * (unit_HT[:, :, None] == unit_HT[:, None])
        self.register_buffer("weight_HTT", weight_HTT, persistent=False)

    def weights(self) -> Tensor:
        return self.weight_HTT


class CandidateInner(nn.Module):
    """The net itself, which is compiled. In a pass, candidates receive messages from those with the
    same digit in other cells, and from those of their cell.
    """

    start: Tensor

    def __init__(self, side: int, width: int, hidden: int, heads: int | None, layers: int) -> None:
        super().__init__()
        self.register_buffer("start", lecun_normal(width, std=0.5))
        self.known = nn.Parameter(lecun_normal(4, 2 * hidden, std=0.5))
        self.layers = nn.ModuleList()
        for _ in range(layers):
            mixer: Mixer = GridMixer(width, heads, side) if heads else UnitMixer(width, side)
            block = SymbolBlock(width, hidden, mixer, EPS, mlp_norm=True)
            with torch.no_grad():  # a pass changes little at first; else many passes learn nothing
                block.down_proj.weight.mul_(0.1)
            self.layers.append(block)
        self.option_head = Linear(width, 1, bias=True)
        self.value_in = Linear(width, 2 * width)
        self.value_head = Linear(2 * width, 1, bias=True)
        with torch.no_grad():  # at first, every digit is as likely as any other
            for head in (self.option_head, self.value_head):
                head.weight.zero_()

    def forward(
        self, z_BTND: Tensor, known_BTN: Tensor, passes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        # what is known of a candidate (open, given, guessed, excluded) acts as a hint in every pass
        known_BTNF = self.known[known_BTN]
        for _ in range(passes):
            for block in self.layers:
                z_BTND = block(z_BTND, known_BTNF)
        logits_BTN = self.option_head.wide(z_BTND)[..., 0]
        # all candidates vote on whether every guess so far is right
        votes_BD = F.gelu(self.value_in(z_BTND), approximate="tanh").mean((1, 2))
        return z_BTND.detach(), logits_BTN, self.value_head.wide(votes_BD)[:, 0]


class CandidateNet(nn.Module):
    """Casts the weights of the inner net, and makes its initial states."""

    def __init__(
        self,
        spec: Spec,
        hidden_size: Width,
        expansion: Annotated[
            float, Field(gt=0, le=1000), Doc("hidden width, as a multiple of hidden_size")
        ],
        num_heads: Annotated[
            PositiveInt | None,
            Doc(
                "ways in which cells hear other cells, which are learned; null: along rows, columns"
                " and boxes"
            ),
        ],
        num_layers: Annotated[Layers, Doc("blocks that a pass goes through")],
        passes: Annotated[int, Field(ge=1, le=1000), Doc("passes through all blocks in a step")],
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__()
        # a Sudoku has as many digits as a row has cells, and two more tokens: blank and padding
        side = math.isqrt(spec.seq_len)
        if side < 4 or (spec.seq_len, spec.vocab_size) != (side**2, side + 2):
            raise ConfigError(
                f"this net solves Sudoku boards, which {spec.name} does not hold; use data=puzzles"
                " with boards, or another arch"
            )
        self.side, self.passes, self.dtype = side, passes, parse_dtype(forward_dtype)
        hidden = max(1, round(expansion * hidden_size))
        self.inner = CandidateInner(side, hidden_size, hidden, num_heads, num_layers)
        self.compiled = False

    def compile(self, **options) -> None:  # type: ignore[override]
        self.compiled = True
        self.inner.compile(**options)

    def fresh_state(self, boards: int) -> Tensor:
        """Returns the initial state, which is the same for every board."""
        return self.inner.start.to(self.dtype).expand(boards, self.side**2, self.side, -1)

    def weights_in_dtype(self) -> dict[str, Tensor]:
        return cast_weights(self.inner, self.dtype)

    def forward(
        self, z_BTND: Tensor, known_BTN: Tensor, weights: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs all passes of one step. Returns the new state, the logits of each cell's digits, and
        the logit of every guess so far being right.
        """
        weights = self.weights_in_dtype() if weights is None else weights
        return functional_call(self.inner, weights, (z_BTND, known_BTN, self.passes))


def what_is_known(inputs_BT: Tensor, board_BT: Tensor, side: int) -> Tensor:
    """Returns the state of each candidate: open, given, guessed, or excluded by its cell's digit.

    `inputs` are the tokens of the puzzle, `board` the same with guesses in some blanks.
    """
    # a filled cell excludes its own other digits; what it means for other cells, the net learns
    digits_N = torch.arange(side, device=board_BT.device) + BLANK + 1
    here_BTN = board_BT[..., None] == digits_N
    chosen_BT1 = torch.where(inputs_BT == board_BT, GIVEN, GUESSED)[..., None]
    open_BT1 = (board_BT == BLANK)[..., None]
    return torch.where(open_BT1, OPEN, torch.where(here_BTN, chosen_BT1, EXCLUDED))
