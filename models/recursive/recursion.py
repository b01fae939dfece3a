"""The net that HRM and TRM share: embeddings, two recurrent states, token and halting logits."""

# B batch, L positions (puzzle prefix + tokens), T tokens, D width, V vocabulary, P puzzle width

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from contract import Noise, Spec
from models.layers import (
    Attention,
    CosSin,
    Embedding,
    ForwardDtype,
    Layers,
    Linear,
    RotaryEmbedding,
    SwiGLU,
    Width,
    cast_weights,
    gated_width,
    lecun_normal,
    parse_dtype,
    rms_norm,
    turns_of,
)
from models.sparse_embedding import SparseEmbedding
from utils.command.marks import SAME_RUN, Fraction, Keys
from utils.errors import ConfigError

State = tuple[Tensor, Tensor]  # z_H and z_L, both [B, L, D]


class GridRotaryEmbedding(RotaryEmbedding):
    """Rotary positions on a square grid: half of each head turns by the row, half by the column.

    The prefix lies on the diagonal that ends before the grid's first corner.
    """

    share = 4

    def angles(
        self, head_width: int, prefix: int, tokens: int, theta: float, dtype: torch.dtype
    ) -> Tensor:
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


class Sizes(Keys):
    """The keys under `arch` of all recursive nets, named as users of HRM and TRM know them."""

    H_cycles: Annotated[int, Field(ge=1, le=1000)]
    L_cycles: Annotated[int, Field(ge=1, le=1000)]
    H_layers: Annotated[int, Field(ge=0, le=1000)]
    """Of the high level; TRM, whose levels share one stack, ignores it"""
    L_layers: Layers
    hidden_size: Width
    num_heads: PositiveInt
    expansion: PositiveFloat
    """Width of the MLPs, as a multiple of hidden_size"""
    puzzle_emb_ndim: NonNegativeInt
    pos_encodings: Literal["rope", "rope2d", "learned", "none"]
    """rope2d: for a square grid"""
    halt_max_steps: Annotated[int, Field(ge=1, le=10000)]
    """Most thinking steps on one puzzle"""
    halt_exploration_prob: Fraction
    """Probability, in each training step, that a slot must have thought for a random number of
    steps before it may halt
    """
    forward_dtype: ForwardDtype
    rms_norm_eps: Fraction
    rope_theta: PositiveFloat
    """Base of the rotary frequencies"""
    mlp_multiple: PositiveInt
    """The width of the gated MLPs is rounded up to a multiple of this"""
    mlp_norm: bool
    """Normalises the gated activations of the MLPs, for optim=muon"""
    eval_halt: Annotated[bool, SAME_RUN]
    """Evaluations leave a puzzle once the net wants to halt and its answer has settled, not after
    all steps
    """
    random_start: bool
    """Each puzzle begins in states of its own, drawn at random"""
    damping: Annotated[float, Field(ge=0, lt=1)]
    """Share of its old state that a thinking step keeps"""
    path_noise: NonNegativeFloat
    """Standard deviation of the noise before each thinking step of training"""
    eval_noise: Annotated[NonNegativeFloat, SAME_RUN]
    """The same for evaluations"""
    chains: Annotated[PositiveInt, SAME_RUN]
    """Evaluations think about each puzzle in so many chains, which noise or starts part"""
    judge: Annotated[Literal["halting", "residual"], SAME_RUN]
    """The chain that answers: that with the highest halting logit, or that whose state has changed
    least in the last step
    """
    puzzle_emb_len: NonNegativeInt
    """Positions before the tokens; 0: as many as puzzle_emb_ndim fills"""
    mlp_t: bool
    """Mixes tokens by an MLP instead of attention"""
    no_ACT_continue: bool
    """Halts by the sign of one logit; false: by HRM's two Q values"""

    def check(self) -> None:
        """Raises ConfigError for keys that do not go together."""
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"arch.hidden_size={self.hidden_size} is not a multiple of"
                f" arch.num_heads={self.num_heads}"
            )
        head = self.hidden_size // self.num_heads
        if self.pos_encodings in ROPES and head % ROPES[self.pos_encodings].share:
            raise ConfigError(
                f"arch.num_heads={self.num_heads} gives heads of {head}; "
                f"{self.pos_encodings} needs multiples of {ROPES[self.pos_encodings].share}"
            )
        if not self.prefix:
            raise ConfigError(
                "arch.puzzle_emb_ndim=0 with arch.puzzle_emb_len=0 leaves no position to read the"
                " halting logits from"
            )
        if self.puzzle_emb_ndim > self.prefix * self.hidden_size:
            raise ConfigError(
                f"arch.puzzle_emb_len={self.puzzle_emb_len} holds {self.prefix * self.hidden_size}"
                f" numbers, fewer than arch.puzzle_emb_ndim={self.puzzle_emb_ndim}; try"
                " arch.puzzle_emb_len=0"
            )
        if self.chains > 1 and not (self.random_start or self.eval_noise):
            raise ConfigError(
                f"arch.chains={self.chains}: all of them would think the same; give"
                " arch.eval_noise=0.3, or train with arch.random_start=true"
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
        eps: float,
        mix_positions: int,
    ) -> None:
        super().__init__()
        if mix_positions:  # an MLP over this many positions takes the place of attention
            self.mlp_t = mlp(mix_positions)
        else:
            self.self_attn = Attention(width, heads)
        self.mixes_by_mlp = bool(mix_positions)
        self.mlp = mlp(width)
        self.eps = eps

    def forward(self, x_BLD: Tensor, cos_sin: CosSin | None) -> Tensor:
        if self.mixes_by_mlp:
            x_BDL = x_BLD.transpose(1, 2)
            x_BLD = rms_norm(x_BDL + self.mlp_t(x_BDL), self.eps).transpose(1, 2)
        else:
            x_BLD = rms_norm(x_BLD + self.self_attn(x_BLD, cos_sin), self.eps)
        return rms_norm(x_BLD + self.mlp(x_BLD), self.eps)


class Level(nn.Module):
    """A stack of blocks that is applied again and again, each time to its state plus an input."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, state_BLD: Tensor, injected_BLD: Tensor, cos_sin: CosSin | None) -> Tensor:
        x_BLD = state_BLD + injected_BLD
        for block in self.layers:
            x_BLD = block(x_BLD, cos_sin)
        return x_BLD


class Inner(nn.Module):
    """The net itself, which is compiled. Puzzle rows are passed in, as their table is sparse."""

    H_init: Tensor
    L_init: Tensor

    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__()
        sizes.check()
        self.sizes = sizes
        if not (spec.vocab_size and spec.table_rows):
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
        # buffers, as published: initial states do not train
        self.register_buffer("H_init", lecun_normal(width, std=1.0))
        self.register_buffer("L_init", lecun_normal(width, std=1.0))

    def level(self, layers: int) -> Level:
        """Builds a stack of blocks of this net's sizes."""
        sizes = self.sizes
        mixed = self.positions if sizes.mlp_t else 0

        def mlp(width: int) -> SwiGLU:
            hidden = gated_width(width, sizes.expansion, sizes.mlp_multiple)
            return SwiGLU(width, hidden, sizes.rms_norm_eps if sizes.mlp_norm else None)

        return Level(
            [
                Block(sizes.hidden_size, sizes.num_heads, mlp, sizes.rms_norm_eps, mixed)
                for _ in range(layers)
            ]
        )

    def recur(self, state: State, x_BLD: Tensor, cos_sin: CosSin | None) -> State:
        """Runs all cycles of one step; gradients flow only through the last ones."""
        raise NotImplementedError

    def forward(
        self, z_H: Tensor, z_L: Tensor, tokens_BT: Tensor, puzzle_BP: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        cos_sin = self.rotary_emb() if self.sizes.pos_encodings in ROPES else None
        z_H, z_L = self.recur((z_H, z_L), self.embed(tokens_BT, puzzle_BP), cos_sin)
        # the answer is read from z_H alone; halting from its first position, which is no token
        logits_BTV = self.lm_head(z_H)[:, self.sizes.prefix :]
        return (z_H.detach(), z_L.detach()), logits_BTV, self.q_head.wide(z_H[:, 0])

    def embed(self, tokens_BT: Tensor, puzzle_BP: Tensor | None) -> Tensor:
        """Returns the puzzle prefix and the tokens as one sequence."""
        x_BLD = self.embed_tokens(tokens_BT)
        prefix, width = self.sizes.prefix, self.sizes.hidden_size
        if puzzle_BP is None:
            x_BLD = F.pad(x_BLD, (0, 0, prefix, 0))
        else:
            padded_BP = F.pad(puzzle_BP, (0, prefix * width - puzzle_BP.shape[-1]))
            x_BLD = torch.cat((padded_BP.view(-1, prefix, width), x_BLD), dim=1)
        if self.sizes.pos_encodings == "learned":
            x_BLD = math.sqrt(0.5) * (x_BLD + self.embed_pos.embedding_weight)  # keeps the variance
        return math.sqrt(width) * x_BLD  # embeddings are drawn with a deviation of 1 / √width


class RecursiveNet(nn.Module):
    """Wraps the inner net: casts its weights, and makes initial states and steps of reasoning."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner = inner
        self.sizes = inner.sizes
        self.compiled = False

    def compile(self, **options) -> None:  # type: ignore[override]
        self.compiled = True
        self.inner.compile(**options)

    @property
    def dtype(self) -> torch.dtype:
        return parse_dtype(self.sizes.forward_dtype)

    def weights_in_dtype(self) -> dict[str, Tensor] | None:
        """Returns the weights cast to the forward dtype, or None if they need no cast."""
        if self.dtype == self.inner.lm_head.weight.dtype:
            return None
        return cast_weights(self.inner, self.dtype)

    def fresh_state(self, noise: Noise, slots: int, tokens: int) -> State:
        """Returns the initial state: drawn with `random_start`, else the same for every slot."""
        shape = (slots, tokens + self.sizes.prefix, self.sizes.hidden_size)
        if self.sizes.random_start:
            z_H, z_L = (noise.truncated_normal(f"start of {z}", shape) for z in ("z_H", "z_L"))
            return z_H.to(self.dtype), z_L.to(self.dtype)
        z_H, z_L = self.inner.H_init.to(self.dtype), self.inner.L_init.to(self.dtype)
        return z_H.expand(shape), z_L.expand(shape)

    def puzzle_rows(self, ids_B: Tensor) -> Tensor | None:
        """Returns this step's rows of the puzzle table, in the forward dtype."""
        if not self.sizes.puzzle_emb_ndim:
            return None
        return self.inner.puzzle_emb(ids_B).to(self.dtype)

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        rows_BP: Tensor | None,
        weights: dict[str, Tensor] | None,
    ) -> tuple[State, Tensor, Tensor]:
        """Does one step of reasoning: returns the new state, token logits and halting logits."""
        arguments = (*state, tokens_BT, rows_BP)
        if weights is None:
            new, logits_BTV, q_B2 = self.inner(*arguments)
        else:
            new, logits_BTV, q_B2 = functional_call(self.inner, weights, arguments)
        if damping := self.sizes.damping:
            new = new[0].lerp(state[0], damping), new[1].lerp(state[1], damping)
        return new, logits_BTV, q_B2

    def wants_to_halt(self, q_B2: Tensor) -> Tensor:
        """Returns which slots want to halt: in TRM if the halting logit is positive, in HRM if it
        is above the logit of continuing.
        """
        return self.halting_margin(q_B2) > 0

    def halting_margin(self, q_B2: Tensor) -> Tensor:
        """Returns by how much a slot's wish to halt exceeds that to continue."""
        return q_B2[:, 0] - (0.0 if self.sizes.no_ACT_continue else q_B2[:, 1])


def disturbed(state: State, noise: Noise, std: float) -> State:
    """Returns the state with noise of a standard deviation, with which a path leaves the basin of a
    wrong answer.
    """
    if not std:
        return state
    z_H, z_L = (
        z + (std * noise.truncated_normal(f"path of {name}", z.shape)).to(z.dtype)
        for name, z in zip(("z_H", "z_L"), state, strict=True)
    )
    return z_H, z_L


def where_slots(slots_B: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns the new rows for the given slots, and the old ones for all others."""
    return torch.where(slots_B.view(-1, *[1] * (new.ndim - 1)), new, old)
