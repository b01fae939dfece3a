"""Value iteration (Tamar et al. 2016, arXiv 1602.02867) under a recurrent convolution, for square
grids such as mazes. One rule holds in every cell; information travels one cell in each pass.
"""

# B batch, L positions (one for halting, then the T cells), S side, D width, P puzzle width, F gates
# and candidates; z_H and z_L are states

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract import Spec
from models.layers import Embedding, Linear, gated_width, rms_norm, widen
from models.recursive.recursion import EPS, RecursiveNet, State
from models.recursive.sequence import SequenceInner, SequenceSizes
from utils.errors import ConfigError

UNREACHED = -1e4  # the value of a cell that no reward has reached, and of those beyond the edge
REWARD_SCALE, COST_SCALE = 100.0, 10.0  # so that rewards and costs learn as fast as other weights
LOG_COST_LIMIT = 7.0


class GridBlock(nn.Module):
    """A gated 3×3 convolution with a residual and a norm after it. The hint is added to the gates
    and not to the state, so that cells can remember.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(9 * width, 2 * hidden)
        self.down_proj = Linear(hidden, width)

    def forward(self, z_BSSD: Tensor, hint_BSSF: Tensor) -> Tensor:
        # the weights of a linear map over the nine cells around, so that initialisers and Muon see
        # a matrix
        kernel = self.gate_up_proj.weight.to(z_BSSD.dtype).unflatten(1, (-1, 3, 3))
        both_BFSS = F.conv2d(z_BSSD.permute(0, 3, 1, 2), kernel, padding=1)
        gate, up = (both_BFSS.permute(0, 2, 3, 1) + hint_BSSF).chunk(2, dim=-1)
        return rms_norm(z_BSSD + self.down_proj(F.silu(gate) * up), EPS)


class GridSizes(SequenceSizes):
    value_iteration: bool
    """false: cells see their neighbours alone, and `L_cycles` has no effect"""


class GridInner(SequenceInner):
    """The scratchpad z_L holds values: a cell's value is its reward, or its best neighbour's value
    less the cost of the cell. Rewards and costs are learned for each token and channel. A
    convolution that sees how the values rise and fall around each cell refines the answer z_H.

    Each step has `L_cycles` + `H_cycles` passes over the values, of which the last `H_cycles` have
    gradients, then `H_cycles` passes over the answer. The halting logits are read from the largest
    number of the answer's cells in each channel.
    """

    sizes: GridSizes

    def __init__(self, sizes: GridSizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        self.side = math.isqrt(spec.seq_len)
        if self.side**2 != spec.seq_len:
            raise ConfigError(
                f"arch=grid solves square puzzles, and {spec.name} has {spec.seq_len} cells; use"
                " another arch"
            )
        if sizes.puzzle_emb_ndim or sizes.prefix != 1:
            raise ConfigError(
                "arch=grid has one position before the cells and no puzzle table; leave"
                " arch.puzzle_emb_ndim=0 and arch.puzzle_emb_len=1"
            )
        width = sizes.hidden_size
        hidden = gated_width(width, sizes.expansion, sizes.mlp_multiple)
        # tokens act on the gates of every block, and never enter the state
        self.embed_tokens = Embedding(spec.vocab_size, 2 * hidden, std=1.0)
        if sizes.value_iteration:
            self.rewards = Embedding(spec.vocab_size, width, std=1.0)
            self.costs = Embedding(spec.vocab_size, width, std=0.1)
            self.slopes_proj = Linear(4 * width, 2 * hidden)
        self.layers = nn.ModuleList(GridBlock(width, hidden) for _ in range(sizes.L_layers))
        # no value is known before the first pass, unlike TRM's random start
        self.L_init.fill_(UNREACHED)

    @property
    def passes(self) -> int:
        return 0  # noise would drown how values rise and fall

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        puzzle_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        z_H, z_L = state
        # state and tokens as images; the first position belongs to halting alone
        grid_BSS = tokens_BT.unflatten(1, (self.side, self.side))
        z_BSSD, value_BSSD = (z[:, 1:].unflatten(1, (self.side, self.side)) for z in (z_H, z_L))
        hint_BSSF = self.embed_tokens(grid_BSS)
        # the convolution sees the slopes of the values, not their size: it is these that show the
        # way
        if self.sizes.value_iteration:
            value_BSSD = self.values(widen(value_BSSD), grid_BSS)
            slopes = torch.cat([torch.tanh(one - value_BSSD) for one in neighbours(value_BSSD)], -1)
            hint_BSSF = hint_BSSF + self.slopes_proj(slopes.to(z_H.dtype))
        for _ in range(self.sizes.H_cycles):
            for block in self.layers:
                z_BSSD = block(z_BSSD, hint_BSSF)
        z_BLD, value_BLD = z_BSSD.flatten(1, 2), value_BSSD.detach().flatten(1, 2)
        # halting costs far more than cells do at first, so its gradients must not reach the state
        largest_BD = z_BLD.detach().amax(1)
        new = (
            torch.cat((largest_BD[:, None], z_BLD.detach()), 1),
            torch.cat((widen(z_L[:, :1]), value_BLD), 1),
        )
        return new, self.lm_head(z_BLD), self.q_head.wide(largest_BD)

    def values(self, value_BSSD: Tensor, grid_BSS: Tensor) -> Tensor:
        """Iterates the values in float32 at least: half precision cannot count the steps."""
        # rewards and costs depend on the token alone; the exponential keeps costs positive
        reward_BSSD = REWARD_SCALE * widen(self.rewards(grid_BSS))
        log_cost_BSSD = COST_SCALE * widen(self.costs(grid_BSS))
        cost_BSSD = log_cost_BSSD.clamp(-LOG_COST_LIMIT, LOG_COST_LIMIT).exp()

        def one_pass(value_BSSD: Tensor) -> Tensor:
            best_BSSD = reduce(torch.maximum, neighbours(value_BSSD))
            return torch.maximum(reward_BSSD, best_BSSD - cost_BSSD)

        # values first spread over the grid; gradients flow through the last passes only
        with torch.no_grad():
            for _ in range(self.sizes.L_cycles):
                value_BSSD = one_pass(value_BSSD)
        for _ in range(self.sizes.H_cycles):
            value_BSSD = one_pass(value_BSSD)
        return value_BSSD


class Grid(RecursiveNet):
    """Value iteration and a recurrent convolution, trained like TRM."""

    def __init__(self, spec: Spec, keys: GridSizes) -> None:
        super().__init__(GridInner(keys, spec))


def neighbours(value_BSSD: Tensor) -> list[Tensor]:
    """Returns the values of the cells below, left, right and above each cell."""
    padded = F.pad(value_BSSD, (0, 0, 1, 1, 1, 1), value=UNREACHED)
    rows, columns = padded[:, :, 1:-1], padded[:, 1:-1]
    return [rows[:, 2:], columns[:, :, :-2], columns[:, :, 2:], rows[:, :-2]]
