"""A recurrent net whose answers change with the board under every symmetry of Sudoku.

Sudoku is an exact cover: n³ options, a digit in a cell each, and 4n² units of n options, of which
exactly one is right: the options of a cell, and those of a digit in a row, a column or a box. The
net keeps a vector for each option. In each pass, options send messages to their units, and units
send back what they make of the sum. All options share their weights, and so do all units of a kind,
with rows and columns as one kind, so that the number of weights does not depend on the size, and no
board needs to be shown in more than one of its images.
"""

# B boards, T cells, N digits, U rows, columns and boxes, D width, M width of messages,
# F hidden width

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import Doc

from contract import Spec
from models.layers import (
    ForwardDtype,
    Linear,
    Width,
    cast_weights,
    lecun_normal,
    parse_dtype,
    rms_norm,
)
from utils.errors import ConfigError

BLANK = 1  # digit d is token d + 1, pad is 0
OPEN, GIVEN, GUESSED, EXCLUDED = range(4)  # what is known of an option
EPS = 1e-6
Expansion = Annotated[
    float, Field(gt=0, le=1000), Doc("hidden width, as a multiple of hidden_size")
]
Passes = Annotated[int, Field(ge=1, le=1000), Doc("exchanges of messages in a step")]


class Unit(nn.Module):
    """Computes a unit's reply from the sum of its options' messages."""

    def __init__(self, options: int, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = options**-0.5
        self.read = Linear(width, width, bias=True)
        self.reply = nn.Parameter(lecun_normal(hidden, width, std=0.5 * width**-0.5))

    def forward(self, sum_M: Tensor) -> Tensor:
        read_M = rms_norm(self.read(sum_M * self.scale), EPS)
        return F.linear(F.gelu(read_M, approximate="tanh"), self.reply)


class OptionInner(nn.Module):
    """The net itself, which is compiled: a state for each option, and passes in which options hear
    of each other.
    """

    start: Tensor

    def __init__(self, side: int, width: int, hidden: int) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("start", lecun_normal(width, std=0.5))
        self.known = nn.Parameter(lecun_normal(4, 2 * hidden, std=0.5))

    def add_heads(self, width: int) -> None:
        """Adds the heads, after the layers of a subclass."""
        self.option_head = Linear(width, 1, bias=True)
        self.value_in = Linear(width, 2 * width)
        self.value_head = Linear(2 * width, 1, bias=True)
        with torch.no_grad():  # at first, every digit is as likely as any other
            for head in (self.option_head, self.value_head):
                head.weight.zero_()

    def forward(
        self, z_BTND: Tensor, known_BTN: Tensor, passes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        known_BTNF = self.known[known_BTN]
        for _ in range(passes):
            z_BTND = self.one_pass(z_BTND, known_BTNF)
        logits_BTN = self.option_head.wide(z_BTND)[..., 0]
        votes_BD = F.gelu(self.value_in(z_BTND), approximate="tanh").mean((1, 2))
        return z_BTND.detach(), logits_BTN, self.value_head.wide(votes_BD)[:, 0]

    def one_pass(self, z_BTND: Tensor, known_BTNF: Tensor) -> Tensor:
        """Returns the states after all options have heard of each other once."""
        raise NotImplementedError


class WiredInner(OptionInner):
    """Options send messages to their units, and units reply."""

    members_UT: Tensor  # 1 where a cell lies in a row, column or box

    def __init__(self, side: int, width: int, hidden: int) -> None:
        super().__init__(side, width, hidden)
        self.register_buffer("members_UT", members(side), persistent=False)
        self.to_units = Linear(width, width)
        self.cell, self.line, self.box = (Unit(side, width, hidden) for _ in range(3))
        self.up = Linear(width, 2 * hidden)
        self.down = Linear(hidden, width)
        self.add_heads(width)

    def one_pass(self, z_BTND: Tensor, known_BTNF: Tensor) -> Tensor:
        batch, n, members_UT = len(z_BTND), self.side, self.members_UT.to(z_BTND.dtype)
        messages_BTNM = F.gelu(self.to_units(z_BTND), approximate="tanh")
        sums_BUNM = (members_UT @ messages_BTNM.flatten(2)).view(batch, 3 * n, n, -1)
        lines_BUNM, boxes_BUNM = sums_BUNM.split((2 * n, n), 1)
        replies_BUNF = torch.cat((self.line(lines_BUNM), self.box(boxes_BUNM)), 1)
        to_options_BTNF = (members_UT.mT @ replies_BUNF.flatten(2)).view(batch, n * n, n, -1)
        to_options_BTNF = to_options_BTNF + self.cell(messages_BTNM.sum(2))[:, :, None]
        up_BTNF, gate_BTNF = (self.up(z_BTND) + known_BTNF).chunk(2, -1)
        hidden_BTNF = F.silu(up_BTNF + to_options_BTNF) * gate_BTNF
        return rms_norm(z_BTND + self.down(hidden_BTNF), EPS)


class SudokuNet(nn.Module):
    """Casts the weights of the inner net, and makes its initial states."""

    def __init__(self, spec: Spec, passes: int, forward_dtype: str) -> None:
        super().__init__()
        side = math.isqrt(spec.seq_len)
        if side < 4 or (spec.seq_len, spec.vocab_size) != (side**2, side + 2):
            raise ConfigError(
                f"this net solves Sudoku boards, which {spec.name} does not hold; use data=puzzles"
                " with boards, or another arch"
            )
        self.side, self.passes, self.dtype = side, passes, parse_dtype(forward_dtype)
        self.inner: OptionInner
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


class WiredNet(SudokuNet):
    """Knows rows, columns and boxes."""

    def __init__(
        self,
        spec: Spec,
        hidden_size: Width,
        expansion: Expansion,
        passes: Passes,
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__(spec, passes, forward_dtype)
        self.inner = WiredInner(self.side, hidden_size, max(1, round(expansion * hidden_size)))


def what_is_known(inputs_BT: Tensor, board_BT: Tensor, side: int) -> Tensor:
    """Returns for each option whether it is open, given, guessed or excluded by its cell's digit.

    `inputs` are the tokens of the puzzle, `board` the same with guesses in some blanks.
    """
    digits_N = torch.arange(side, device=board_BT.device) + BLANK + 1
    here_BTN = board_BT[..., None] == digits_N
    chosen_BT1 = torch.where(inputs_BT == board_BT, GIVEN, GUESSED)[..., None]
    open_BT1 = (board_BT == BLANK)[..., None]
    return torch.where(open_BT1, OPEN, torch.where(here_BTN, chosen_BT1, EXCLUDED))


def members(side: int) -> Tensor:
    """Returns which cells lie in each row, then in each column, then in each box."""
    # boxes are as close to square as possible, and no higher than wide
    height = next(height for height in range(math.isqrt(side), 0, -1) if side % height == 0)
    row_T, column_T = torch.arange(side**2) // side, torch.arange(side**2) % side
    box_T = row_T // height * height + column_T // (side // height)
    return torch.cat([F.one_hot(unit_T, side).T for unit_T in (row_T, column_T, box_T)]).float()
