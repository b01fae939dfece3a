"""A puzzle as a sequence of tokens, as HRM and TRM see it: prefix, embeddings, states, heads."""

# B batch, L positions (puzzle prefix + tokens), T tokens, D width, V vocabulary, P puzzle
# width; z_H and z_L are states

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from contract import Spec
from models.layers import (
    Attention,
    CosSin,
    Embedding,
    Linear,
    RotaryEmbedding,
    SwiGLU,
    gated_width,
    lecun_normal,
    parse_dtype,
    rms_norm,
    turns_of,
)
from models.recursive.recursion import EPS, Inner, Level, Sizes, State
from models.sparse_embedding import SparseEmbedding
from utils.errors import ConfigError


class GridRotaryEmbedding(RotaryEmbedding):
    """Rotary positions on a square grid: half of each head turns by the row, half by the column.

    The prefix lies on the diagonal that ends before the grid's first corner.
    """

    share = 4

    def angles(
        self, head_width: int, prefix: int, tokens: int, theta: float, dtype: torch.dtype
    ) -> Tensor:
        # positions by row and column, so that cells below each other are as close as neighbours in
        # a row
        side = math.isqrt(tokens)
        if side * side != tokens:
            raise ConfigError(
                f"arch.pos_encodings=rope2d: {tokens} tokens are not a square grid; choose rope"
            )
        before, cells = torch.arange(-prefix, 0), torch.arange(tokens)
        rows_L = torch.cat((before, cells // side)).to(dtype)
        columns_L = torch.cat((before, cells % side)).to(dtype)
        pairs = head_width // 4
        return torch.cat((turns_of(rows_L, pairs, theta), turns_of(columns_L, pairs, theta)), dim=1)


ROPES = {"rope": RotaryEmbedding, "rope2d": GridRotaryEmbedding}


class SequenceSizes(Sizes):
    H_layers: Annotated[int, Field(ge=0, le=1000)]
    """Blocks of the high level; TRM has one stack for both levels and ignores it"""
    num_heads: PositiveInt
    puzzle_emb_ndim: NonNegativeInt
    puzzle_emb_len: NonNegativeInt
    """Positions before the tokens; 0: as many as puzzle_emb_ndim fills. Without any, the halting
    logits are read from the first token
    """
    pos_encodings: Literal["rope", "rope2d", "learned", "none"]
    """rope2d: for a square grid"""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies"""
    mlp_t: bool
    """Mixes tokens by an MLP instead of attention"""

    def check(self) -> None:
        super().check()
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"arch.hidden_size={self.hidden_size} is not a multiple of"
                f" arch.num_heads={self.num_heads}"
            )
        # rotations take pairs of numbers, on a grid pairs for each of two axes
        head = self.hidden_size // self.num_heads
        if self.pos_encodings in ROPES and head % ROPES[self.pos_encodings].share:
            raise ConfigError(
                f"arch.num_heads={self.num_heads} gives heads of {head}; "
                f"{self.pos_encodings} needs multiples of {ROPES[self.pos_encodings].share}"
            )
        if self.puzzle_emb_ndim > self.prefix * self.hidden_size:
            raise ConfigError(
                f"arch.puzzle_emb_len={self.puzzle_emb_len} holds {self.prefix * self.hidden_size}"
                f" numbers, fewer than arch.puzzle_emb_ndim={self.puzzle_emb_ndim}; try"
                " arch.puzzle_emb_len=0"
            )

    @property
    def prefix(self) -> int:
        """The number of positions before the tokens."""
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)


class Block(nn.Module):
    """Mixes positions, then channels, each with a residual and a norm after it."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: Callable[[int], SwiGLU],
        mix_positions: int,
    ) -> None:
        super().__init__()
        if mix_positions:  # an MLP over this many positions takes the place of attention
            self.mlp_t = mlp(mix_positions)
        else:
            self.self_attn = Attention(width, heads)
        self.mixes_by_mlp = bool(mix_positions)
        self.mlp = mlp(width)

    def forward(self, x_BLD: Tensor, cos_sin: CosSin | None = None) -> Tensor:
        # the MLP runs along positions, so that it mixes cells as attention would
        if self.mixes_by_mlp:
            x_BDL = x_BLD.transpose(1, 2)
            x_BLD = rms_norm(x_BDL + self.mlp_t(x_BDL), EPS).transpose(1, 2)
        else:
            x_BLD = rms_norm(x_BLD + self.self_attn(x_BLD, cos_sin), EPS)
        return rms_norm(x_BLD + self.mlp(x_BLD), EPS)


class SequenceInner(Inner):
    """A puzzle as a sequence of tokens after a prefix, which holds its row of the puzzle table."""

    H_init: Tensor
    L_init: Tensor

    sizes: SequenceSizes

    def __init__(self, sizes: SequenceSizes, spec: Spec) -> None:
        super().__init__(sizes)
        if not hasattr(spec, "table_rows"):
            raise ConfigError(
                "this net solves puzzles, and the data has none; use data=puzzles, or arch=gpt for"
                " text"
            )
        width, self.positions = sizes.hidden_size, spec.seq_len + sizes.prefix
        std = width**-0.5
        self.embed_tokens = Embedding(spec.vocab_size, width, std)
        self.lm_head = Linear(width, spec.vocab_size)
        self.q_head = Linear(width, 2, bias=True)
        with torch.no_grad():  # at first, the net almost never halts, which bootstraps faster
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(-5.0)  # type: ignore[union-attr]
        if sizes.puzzle_emb_ndim:
            self.puzzle_emb = SparseEmbedding(max(1, spec.table_rows), sizes.puzzle_emb_ndim)
        if sizes.pos_encodings in ROPES:
            self.rotary_emb = ROPES[sizes.pos_encodings](
                width // sizes.num_heads,
                sizes.prefix,
                spec.seq_len,
                sizes.rope_theta,
                parse_dtype(sizes.forward_dtype),
            )
        elif sizes.pos_encodings == "learned":
            self.embed_pos = Embedding(self.positions, width, std)
        # buffers, as published: initial states do not train; EqR, which draws them, saves none
        saved = not sizes.random_start
        self.register_buffer("H_init", lecun_normal(width, std=1.0), persistent=saved)
        self.register_buffer("L_init", lecun_normal(width, std=1.0), persistent=saved)

    def starts(self) -> dict[str, Tensor]:
        return {"z_H": self.H_init, "z_L": self.L_init}

    def state_shape(self, slots: int, tokens: int) -> tuple[int, ...]:
        return slots, tokens + self.sizes.prefix, self.sizes.hidden_size

    def stack(self, layers: int) -> Level:
        sizes = self.sizes
        mixed = self.positions if sizes.mlp_t else 0

        def mlp(width: int) -> SwiGLU:
            hidden = gated_width(width, sizes.expansion, sizes.mlp_multiple)
            return SwiGLU(width, hidden, EPS if sizes.mlp_norm else None)

        blocks: list[nn.Module] = [
            Block(sizes.hidden_size, sizes.num_heads, mlp, mixed) for _ in range(layers)
        ]
        return Level(blocks, sizes.damping)

    @property
    def passes(self) -> int:
        return self.sizes.H_cycles * (self.sizes.L_cycles + 1)

    def recur(
        self, state: State, x_BLD: Tensor, cos_sin: CosSin | None, noise: Iterator[Tensor]
    ) -> State:
        """Runs all cycles of one step, with the next noise, if any, in each pass; gradients flow
        only through the last ones.
        """
        raise NotImplementedError

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        puzzle_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        cos_sin = self.rotary_emb() if self.sizes.pos_encodings in ROPES else None
        z_H, z_L = self.recur(state, self.embed(tokens_BT, puzzle_BP), cos_sin, iter(noise))
        # the answer is read from z_H alone; halting from its first position, which is not a token
        logits_BTV = self.lm_head(z_H)[:, self.sizes.prefix :]
        return (z_H.detach(), z_L.detach()), logits_BTV, self.q_head.wide(z_H[:, 0])

    def embed(self, tokens_BT: Tensor, puzzle_BP: Tensor | None) -> Tensor:
        """Returns the puzzle prefix and the tokens as one sequence."""
        x_BLD = self.embed_tokens(tokens_BT)
        prefix, width = self.sizes.prefix, self.sizes.hidden_size
        # the puzzle's row fills the prefix; without a table its positions stay empty
        if puzzle_BP is None:
            x_BLD = F.pad(x_BLD, (0, 0, prefix, 0))
        else:
            padded_BP = F.pad(puzzle_BP, (0, prefix * width - puzzle_BP.shape[-1]))
            x_BLD = torch.cat((padded_BP.view(-1, prefix, width), x_BLD), dim=1)
        if self.sizes.pos_encodings == "learned":
            x_BLD = math.sqrt(0.5) * (x_BLD + self.embed_pos.embedding_weight)  # keeps the variance
        return math.sqrt(width) * x_BLD  # embeddings are drawn with a deviation of 1 / √width
