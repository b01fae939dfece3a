"""A recursive net that treats all symbols of a puzzle alike, as SE-RRM does (arXiv 2603.02193).

A cell has a field of state for each symbol, the digits of a Sudoku for example, and all fields
share their weights. So a puzzle with other symbols in the same places gets the same answer in those
symbols, and no puzzle needs to be shown with its digits permuted. No rule of Sudoku is wired in:
which cells have to do with each other is learned.
"""

# B batch, T cells, N symbols, V vocabulary, D width, F hidden width, H heads, K head width,
# P puzzle width, X symbols and head widths together

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from contract import Spec
from models.layers import Embedding, Linear, gated, gated_width, lecun_normal, rms_norm
from models.recursive.recursion import EPS, Inner, Level, RecursiveNet, Sizes, State
from utils.errors import ConfigError


class SymbolSizes(Sizes):
    num_heads: PositiveInt
    """Heads: ways to weigh messages of other cells"""
    symbols: PositiveInt | None
    """So many tokens, the last of the vocabulary, are interchangeable; null: the digits of a
    Sudoku
    """


class Mixer(nn.Module):
    """Sums messages over the grid, each head in its own way."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"arch.hidden_size={width} is not a multiple of arch.num_heads={heads}"
            )
        self.heads = heads
        self.message_proj = Linear(width, width)

    def weights(self) -> Tensor:
        """Returns the weight of each cell's message to each other cell, for each head."""
        raise NotImplementedError

    def forward(self, x_BTND: Tensor) -> Tensor:
        # each cell sends the same message for a symbol to all cells
        message_BTND = F.gelu(self.message_proj(x_BTND), approximate="tanh")
        weight_HTT = self.weights().to(x_BTND.dtype)
        # heads and cells first: one product for each head sums over cells
        message_BHTNK = message_BTND.unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4)
        mixed_BHTX = weight_HTT @ message_BHTNK.flatten(3)
        mixed_BHTNK = mixed_BHTX.unflatten(-1, message_BHTNK.shape[3:])
        return mixed_BHTNK.permute(0, 2, 3, 1, 4).flatten(3)


class GridMixer(Mixer):
    """Its weights are learned for each pair of rows and each pair of columns, and that of two cells
    is the product of both. A row, a column or a box can be such a sum.
    """

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__(width, heads)
        # small at first: a cell learns which other cells matter
        std = 0.5 * side**-0.5
        self.rows = nn.Parameter(lecun_normal(heads, side, side, std=std))
        self.columns = nn.Parameter(lecun_normal(heads, side, side, std=std))

    def weights(self) -> Tensor:
        weight_HTT = torch.einsum("hij,hkl->hikjl", self.rows, self.columns)
        return weight_HTT.flatten(3).flatten(1, 2)


class SymbolBlock(nn.Module):
    """A gated MLP whose gates also receive the same field of other cells, and the mean of all
    fields of their cell.
    """

    def __init__(self, width: int, hidden: int, mixer: Mixer, eps: float, mlp_norm: bool) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, eps if mlp_norm else None
        self.mixer = mixer
        self.cells_proj = Linear(width, hidden)
        self.symbols_proj = Linear(width, hidden)
        self.gate_up_proj = Linear(width, 2 * hidden)
        self.down_proj = Linear(hidden, width)

    def forward(self, x_BTND: Tensor, hint_BTNF: Tensor | None = None) -> Tensor:
        """Adds the hint to gates and to what they gate, before the messages of others."""
        # gates and what they let through come from the candidate itself
        both_BTNF = self.gate_up_proj(x_BTND)
        both_BTNF = both_BTNF if hint_BTNF is None else both_BTNF + hint_BTNF
        gate_BTNF, up_BTNF = both_BTNF.chunk(2, dim=-1)
        # others act on the gates alone: a field is opened or shut by them, never overwritten
        gate_BTNF = gate_BTNF + self.cells_proj(self.mixer(x_BTND))
        gate_BTNF = gate_BTNF + self.symbols_proj(x_BTND.mean(2, keepdim=True))
        return rms_norm(x_BTND + self.down_proj(gated(gate_BTNF, up_BTNF, self.norm_eps)), self.eps)


class SymbolInner(Inner):
    """One state, which goes `L_cycles` times through the blocks in each of `H_cycles` rounds, each
    time with the puzzle added; only the last round has gradients.
    """

    z_init: Tensor
    sizes: SymbolSizes

    def __init__(self, sizes: SymbolSizes, spec: Spec) -> None:
        super().__init__(sizes)
        # without a number, the symbols are a Sudoku's: as many as a row has cells, after blank and
        # padding
        side, width = math.isqrt(spec.seq_len), sizes.hidden_size
        self.symbols = sizes.symbols or side
        self.others = spec.vocab_size - self.symbols
        if side * side != spec.seq_len:
            raise ConfigError(
                f"arch=symbols solves square puzzles, and {spec.name} has {spec.seq_len} cells;"
                " use another arch"
            )
        if self.others < 1 or (not sizes.symbols and self.others != 2):
            raise ConfigError(
                f"arch.symbols={sizes.symbols}: {spec.name} has {spec.vocab_size} tokens for"
                f" {side} × {side} cells, so its symbols are not the digits of a Sudoku; say how"
                " many tokens, the last of the vocabulary, are interchangeable, or use another arch"
            )
        # what a field sees of its cell: another token, another symbol, or its own
        self.embed_tokens = Embedding(self.others + 2, width, width**-0.5)
        # a field scores its own symbol, and all fields together the other tokens
        self.lm_head = Linear(width, 1 + self.others)
        self.vote_proj = Linear(width, 2 * width)
        self.q_head = Linear(2 * width, 2, bias=True)
        with torch.no_grad():  # at first, the net almost never halts, which bootstraps faster
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(-5.0)  # type: ignore[union-attr]
        hidden = gated_width(width, sizes.expansion, sizes.mlp_multiple)
        self.level = Level(
            [
                SymbolBlock(
                    width,
                    hidden,
                    GridMixer(width, sizes.num_heads, side),
                    EPS,
                    sizes.mlp_norm,
                )
                for _ in range(sizes.L_layers)
            ],
            sizes.damping,
        )
        self.register_buffer("z_init", lecun_normal(width, std=1.0))

    def starts(self) -> dict[str, Tensor]:
        return {"z": self.z_init}

    def state_shape(self, slots: int, tokens: int) -> tuple[int, ...]:
        return slots, tokens, self.symbols, self.sizes.hidden_size

    @property
    def passes(self) -> int:
        return self.sizes.H_cycles * self.sizes.L_cycles

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        puzzle_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        # as in TRM, all rounds but the last run without gradients
        (z_BTND,), x_BTND, of_passes = state, self.embed(tokens_BT), iter(noise)
        with torch.no_grad():
            for _ in range(self.passes - self.sizes.L_cycles):
                z_BTND = self.level(z_BTND, x_BTND, None, next(of_passes, None))
        for _ in range(self.sizes.L_cycles):
            z_BTND = self.level(z_BTND, x_BTND, None, next(of_passes, None))
        # logits of the symbols come from their own fields, those of other tokens from the mean of
        # all
        own_BTN, others_BTN = self.lm_head(z_BTND).split((1, self.others), -1)
        logits_BTV = torch.cat((others_BTN.mean(2), own_BTN[..., 0]), -1)
        # halting sees the mean over cells and symbols, which no permutation changes
        votes_BF = F.gelu(self.vote_proj(z_BTND), approximate="tanh").mean((1, 2))
        return (z_BTND.detach(),), logits_BTV, self.q_head.wide(votes_BF)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Returns what each field sees of its cell."""
        # a field is told whether its cell shows the field's own symbol or another one, but not
        # which: that is what makes all symbols alike
        symbols_N = torch.arange(self.symbols, device=tokens_BT.device) + self.others
        token_BT1 = tokens_BT[..., None]
        symbol_BTN = self.others + (token_BT1 == symbols_N).to(token_BT1.dtype)
        seen_BTN = torch.where(token_BT1 < self.others, token_BT1, symbol_BTN)
        return math.sqrt(self.sizes.hidden_size) * self.embed_tokens(seen_BTN)


class SymbolNet(RecursiveNet):
    """A field of state for each symbol."""

    def __init__(self, spec: Spec, keys: SymbolSizes) -> None:
        super().__init__(SymbolInner(keys, spec))
